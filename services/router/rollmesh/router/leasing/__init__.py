"""Which engine serves which turn: the lease table and its cores, plain state without I/O.

May import nothing else of the router.
"""
