"""The door of `rollmesh.runtime.codec`: its names for other rooms and tests."""

from rollmesh.runtime.codec.arrays import (
    EXPERTS as EXPERTS,
    KINDS as KINDS,
    MOST_LOGPROB as MOST_LOGPROB,
    SUPPORT as SUPPORT,
    Columns as Columns,
    Kind as Kind,
    Logprobs as Logprobs,
    Mask as Mask,
    TokenIds as TokenIds,
    bounded as bounded,
    check_column as check_column,
    experts_column as experts_column,
    experts_of as experts_of,
    joined as joined,
    pack_ids as pack_ids,
    pack_logprobs as pack_logprobs,
    ragged_of as ragged_of,
    rows_between as rows_between,
    support_column as support_column,
    support_of as support_of,
    unpack_ids as unpack_ids,
    unpack_logprobs as unpack_logprobs,
    unpack_mask as unpack_mask,
    unpack_tokens as unpack_tokens,
)
from rollmesh.runtime.codec.conversations import (
    Conversation as Conversation,
    arguments_of as arguments_of,
    check_conversations as check_conversations,
    context_in as context_in,
    conversation_of as conversation_of,
    messages_in as messages_in,
)
from rollmesh.runtime.codec.cuda_handles import (
    BYTES as BYTES,
    CLASSES as CLASSES,
    FIELDS as FIELDS,
    json_handles as json_handles,
)
from rollmesh.runtime.codec.differences import (
    GAPS as GAPS,
    VALUES as VALUES,
    Bits as Bits,
    Difference as Difference,
    checksum as checksum,
)
from rollmesh.runtime.codec.enums import (
    check_enums as check_enums,
    name_of as name_of,
    plain as plain,
    summary_of as summary_of,
    text_of as text_of,
)
from rollmesh.runtime.codec.images import (
    MAX_BYTES as MAX_BYTES,
    MAX_PIXELS as MAX_PIXELS,
    CheckedImage as CheckedImage,
    ImageLimits as ImageLimits,
    check_image as check_image,
    check_media_type as check_media_type,
    decode_image as decode_image,
    read_base64 as read_base64,
    read_data_url as read_data_url,
)
from rollmesh.runtime.codec.records import (
    apply_rewards as apply_rewards,
    check_rewards as check_rewards,
    check_session as check_session,
)
from rollmesh.runtime.codec.sampling_ranges import (
    SAMPLING_RANGES as SAMPLING_RANGES,
    check_ranges as check_ranges,
)
