"""What takes a peer's bytes and decides by itself, fed in this process.

`table.TARGETS` lists it. `feeding` feeds one input. `plain` and `guided` make the inputs.
"""
