"""``hf-fsdp doctor``: versions, devices, and what the package relies on in other libraries."""
