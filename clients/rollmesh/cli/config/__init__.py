"""`rollmesh config`: checks a mesh file, and shows the settings that services have with it.

May import `runtime`, and of services what holds their settings.
"""
