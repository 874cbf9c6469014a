"""The planner's reports: cards, units, published models."""
