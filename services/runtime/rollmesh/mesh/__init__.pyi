"""The door of `rollmesh.mesh`: its names for other rooms and tests."""

from rollmesh.mesh.collectors import CollectorDirectory as CollectorDirectory
from rollmesh.mesh.dialling import DialOut as DialOut
from rollmesh.mesh.directory import (
    JOURNAL_ID_CHARS as JOURNAL_ID_CHARS,
    SidecarDirectory as SidecarDirectory,
    journal_of as journal_of,
)
from rollmesh.mesh.engines import (
    Answer as Answer,
    EngineClient as EngineClient,
    EngineClients as EngineClients,
)
from rollmesh.mesh.failover import (
    COLLECT_MS as COLLECT_MS,
    MOST_COLLECTED_TOKENS as MOST_COLLECTED_TOKENS,
    Failover as Failover,
    Order as Order,
    Suspects as Suspects,
)
from rollmesh.mesh.gateways import (
    GatewayDirectory as GatewayDirectory,
    Peer as Peer,
    Reached as Reached,
)
from rollmesh.mesh.generation import (
    AnswerCheck as AnswerCheck,
    Generation as Generation,
    Sampled as Sampled,
    Tops as Tops,
    ended as ended,
    joined as joined,
    newest_version as newest_version,
    why_not_continued as why_not_continued,
)
from rollmesh.mesh.images import (
    MOST_IMAGES as MOST_IMAGES,
    HeldBytes as HeldBytes,
    Images as Images,
    SentImages as SentImages,
    check_hashes as check_hashes,
    check_places as check_places,
)
from rollmesh.mesh.leases import (
    MOST_IDS as MOST_IDS,
    Holdings as Holdings,
    LeaseClient as LeaseClient,
    Offered as Offered,
    OfferedVersions as OfferedVersions,
    Restating as Restating,
)
from rollmesh.mesh.routers import (
    Membership as Membership,
    Preference as Preference,
    Routers as Routers,
    addresses_of as addresses_of,
    own_id as own_id,
    reachable as reachable,
    retried as retried,
)
from rollmesh.mesh.scores import ScoringEngines as ScoringEngines, weights_of as weights_of
from rollmesh.mesh.tunnels import (
    MOST_CONNECTIONS as MOST_CONNECTIONS,
    RESUME_S as RESUME_S,
    Connection as Connection,
    Tunnel as Tunnel,
    Tunnels as Tunnels,
    answers_of as answers_of,
)
