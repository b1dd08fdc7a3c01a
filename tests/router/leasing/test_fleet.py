"""The weights that the engines of a model may hold."""

from rollmesh.router.leasing.engines import Target
from rollmesh.router.leasing.fleet import Fleet
from rollmesh.router.leasing.policies import least_active


def test_the_newest_version_of_a_model_is_the_higher_of_what_is_accepted_and_offered() -> None:
    fleet = Fleet(least_active)
    assert fleet.newest_version("m") is None
    fleet.aim("m", Target(3, "first"), None)
    assert fleet.newest_version("m") == 3
    fleet.aim("m", Target(3, "first"), Target(5, "second"))
    fleet.aim("other", None, Target(9, "third"))
    assert (fleet.newest_version("m"), fleet.newest_version("other")) == (5, 9)
    fleet.aim("m", Target(7, "fourth"), Target(5, "second"))
    assert fleet.newest_version("m") == 7
    fleet.aim("m", None, None)
    assert fleet.newest_version("m") is None
