"""LoRA adapters: low-rank additions to the linear layers, chosen by each request.

`registry` finds and checks what requests name, `adapter_files` reads what PEFT saved, `sizing` counts memory, and
`manager` holds adapters on the device and applies them.
"""
