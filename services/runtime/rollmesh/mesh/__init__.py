"""What everything that joins a mesh needs: routers, directories, leases and generations.

May import `runtime`. `routers` is how the routers are reached and joined. `directories` find the
other members by asking them, `leasing` holds leases of engines, and `generations` runs on these.
"""
