"""LoRA adapters: low-rank additions to the linear layers, chosen by each request.

`adapter_files` finds and checks what requests name and reads what PEFT saved, and `manager` holds adapters on the
device and applies them.
"""
