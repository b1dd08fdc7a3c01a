"""A mesh of which parts are killed, stopped, cut off, delayed and given full disks, by a seed."""
