"""Atomic changes in Redis, as Lua scripts.

Every script takes the common key prefix and the time as its first arguments. Keys:

    version                   version of this layout
    n, last_ms, last_n        counters: sessions stored; the last position in any log
    totals                    hash of totals
    session:ID                hash: head, arrays, key, idx, n, trajectories, done
    sessions, due             sorted sets of session ids: by n; by the end of the wait for rewards
    group:KEY                 hash: size, first_ms
    all:KEY, members:KEY      sorted sets of a group's sessions, and of the ready ones, by n
    groups, groups:open       sorted sets of group keys by n
    deadlines                 sorted set of log and group key by due time
    log:LOG, units:LOG        stream of units; their positions by id
    parts:LOG                 hash: the sessions of each unit
    consumers, consumer:NAME  hash of settings; start, acknowledged, groups: the log's policy
    attempts:NAME, settled:NAME, settled_ms:NAME   by unit: deliveries; position; time
    filtered:OWNER, counts:OWNER, listed:OWNER     stream of entries; totals; ids already listed
    rewards:ID                hash of the digests of requests that set rewards, by request id
    news                      counts newly complete units, and seeks
    moves, seen               hashes by consumer: times it was moved; time of the last stream
    removed                   sorted set of session ids by time of removal
    format                    version of the keys and their values
"""

_HEAD = r"""
local p, now = ARGV[1], tonumber(ARGV[2])
local function k(...) return p .. table.concat({...}, ':') end
local function place()
  local ms = tonumber(redis.call('GET', k('last_ms')) or '0')
  local n = tonumber(redis.call('GET', k('last_n')) or '0')
  if now > ms then ms, n = now, 0 elseif n >= 1022 then ms, n = ms + 1, 0 end
  n = n + 1
  redis.call('SET', k('last_ms'), string.format('%.0f', ms))
  redis.call('SET', k('last_n'), n)
  return string.format('%.0f-%d', ms, n), string.format('%.0f', ms * 1024 + n)
end
local function stream_id(seq)
  return string.format('%.0f-%d', math.floor(seq / 1024), seq % 1024)
end
local function add_unit(log, id, members, partial, seq)
  if redis.call('ZSCORE', k('units', log), id) then return false end
  local fields = {'id', id, 'members', members, 'partial', partial}
  if not seq or redis.pcall('XADD', k('log', log), stream_id(seq), unpack(fields)).err then
    local at
    at, seq = place()
    redis.call('XADD', k('log', log), at, unpack(fields))
  end
  redis.call('ZADD', k('units', log), seq, id)
  redis.call('HINCRBY', k('totals'), 'log:' .. log, 1)
  redis.call('INCR', k('news'))
  return seq
end
local function make_ready(id, key)
  redis.call('ZADD', k('members', key), redis.call('HGET', k('session', id), 'n'), id)
  add_unit('s', id, '[]', '')
end
local function list(owner, entry, once, counts)
  if once ~= '' and redis.call('SADD', k('listed', owner), once) == 0 then return end
  redis.call('XADD', k('filtered', owner), place(), 'entry', entry)
  local sums = k('counts', owner)
  for at = 1, #counts, 2 do redis.call('HINCRBY', sums, counts[at], counts[at + 1]) end
end
"""

VERSION = 1
"""Version of the layout; incremented with every change of the keys, or of `records.split`."""

OPEN = (
    _HEAD
    + r"""
local found = redis.call('GET', k('version'))
if found then return found end
if redis.call('EXISTS', k('n'), k('consumers'), k('seen')) > 0 then return '0' end
redis.call('SET', k('version'), ARGV[3])
return ARGV[3]
"""
)

INGEST = (
    _HEAD
    + r"""
local id, head, arrays, key, idx, size, due, trajectories, most =
  ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], tonumber(ARGV[11])
if redis.call('ZSCORE', k('removed'), id) then return 'done' end
local known = redis.call('HMGET', k('session', id), 'n', 'done')
if known[1] then
  if known[2] or redis.call('ZSCORE', k('due'), id) then return 'done' end
  return 'undone'
end
local bytes = #head + #arrays
if tonumber(redis.call('HGET', k('totals'), 'bytes') or '0') + bytes > most then return 'full' end
local other = redis.call('HGET', k('group', key), 'size')
if other and other ~= size then return 'size ' .. other end
local n = redis.call('INCR', k('n'))
redis.call('HSET', k('session', id), 'head', head, 'arrays', arrays, 'key', key, 'idx', idx,
  'n', n, 'trajectories', trajectories)
redis.call('ZADD', k('sessions'), n, id)
redis.call('ZADD', k('all', key), n, id)
redis.call('HINCRBY', k('totals'), 'bytes', bytes)
redis.call('HINCRBY', k('totals'), 'sessions', 1)
redis.call('HINCRBY', k('totals'), 'trajectories', trajectories)
if size ~= '' and not other and not redis.call('ZSCORE', k('removed'), 'g:' .. key) then
  redis.call('HSET', k('group', key), 'size', size, 'first_ms', ARGV[2])
  redis.call('ZADD', k('groups'), n, key)
  redis.call('ZADD', k('groups', 'open'), n, key)
  for at = 12, #ARGV, 2 do  -- logs with a deadline
    redis.call('ZADD', k('deadlines'), ARGV[at + 1], ARGV[at] .. '\0' .. key)
  end
end
if due ~= '' then
  redis.call('ZADD', k('due'), due, id)
  return 'held'
end
make_ready(id, key)
return 'new'
"""
)

READY = (
    _HEAD
    + r"""
local id, key = ARGV[3], ARGV[4]
if redis.call('EXISTS', k('session', id)) == 1 then make_ready(id, key) end
return 1
"""
)

MAKE_UNIT = (
    _HEAD
    + r"""
local log, key, members, partial, settled = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local entries = tonumber(ARGV[9])
local seq = add_unit(log, key, members, partial, tonumber(ARGV[8]))
if not seq then return 0 end
seq = string.format('%.0f', seq)
redis.call('HSET', k('parts', log), key, members)
redis.call('ZREM', k('deadlines'), log .. '\0' .. key)
if log == 'g' then redis.call('ZREM', k('groups', 'open'), key) end
if settled ~= '' then  -- by whom it is from the first
  redis.call('ZADD', k('settled', settled), seq, key)
  redis.call('HSET', k('settled_ms', settled), key, ARGV[2])
end
for i = 10, 9 + 3 * entries, 3 do
  list(log, ARGV[i + 1], ARGV[i], {ARGV[i + 2] .. ':u', 1})
end
for i = 10 + 3 * entries, #ARGV do  -- readers: what they settled under another policy stays so
  redis.call('ZADD', k('settled', ARGV[i]), 'XX', seq, key)
end
return 1
"""
)

DONE = (
    _HEAD
    + r"""
local id, key, counted, reason, entry = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
if redis.call('EXISTS', k('session', id)) == 0 then return 0 end
local gone = redis.call('ZSCORE', k('removed'), 'g:' .. key)
for at = 8, #ARGV do  -- logs in which its group was complete without it
  local parts = gone and '[]' or redis.call('HGET', k('parts', ARGV[at]), key)
  local late = parts
  for _, part in ipairs(parts and cjson.decode(parts) or {}) do late = late and part ~= id end
  if late then list(ARGV[at], entry, 'surplus ' .. id, {reason .. ':u', 1}) end
end
redis.call('HSET', k('session', id), 'done', 1)
if redis.call('ZREM', k('due'), id) == 1 and counted ~= '' then
  redis.call('HINCRBY', k('totals'), counted, 1)
end
return 1
"""
)

SETTLE = (
    _HEAD
    + r"""
local name, log, id, reason, owner, entry = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7], ARGV[8]
local seq = redis.call('ZSCORE', k('units', log), id)
if not seq or redis.call('ZSCORE', k('settled', name), id) then return 0 end
if reason == '0' and not redis.call('HGET', k('attempts', name), id) then return 0 end
seq = tonumber(seq)
redis.call('ZADD', k('settled', name), string.format('%.0f', seq), id)
redis.call('HSET', k('settled_ms', name), id, ARGV[2])
redis.call('HDEL', k('attempts', name), id)
redis.call('XACK', k('log', log), name, stream_id(seq))
if reason == '0' then
  redis.call('HINCRBY', k('consumer', name), 'acknowledged', 1)
else
  list(owner, entry, '', {unpack(ARGV, 9)})
end
return 1
"""
)

UPDATE = (
    _HEAD
    + r"""
local name, before, after = ARGV[3], ARGV[4], ARGV[5]
if (redis.call('HGET', k('consumers'), name) or '') ~= before then return 0 end
redis.call('HSET', k('consumers'), name, after)
redis.call('INCR', k('news'))
return 1
"""
)

FILTERED = (
    _HEAD
    + r"""
list(ARGV[3], ARGV[4], '', {unpack(ARGV, 5)})
return 1
"""
)

REWARD = (
    _HEAD
    + r"""
local id, head, request, before, digest = ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local known = redis.call('HMGET', k('session', id), 'head', 'key')
if known[1] ~= before then return {'changed', 0} end
local first = redis.call('HGET', k('rewards', id), request)
if first and first ~= digest then return {'changed', 0} end
local waited = redis.call('ZSCORE', k('due'), id)
if waited then make_ready(id, known[2]) end
if first then return {'repeat', waited and 1 or 0} end
redis.call('HSET', k('rewards', id), request, digest)
redis.call('HSET', k('session', id), 'head', head)
redis.call('HINCRBY', k('totals'), 'bytes', #head - #before)
return {'set', waited and 1 or 0}
"""
)

REMOVE = (
    _HEAD
    + r"""
local key, gone = ARGV[3], 0
if redis.call('ZCARD', k('all', key)) ~= tonumber(ARGV[4]) then return 0 end  -- one came since
for _, id in ipairs(redis.call('ZRANGE', k('all', key), 0, -1)) do
  local session = k('session', id)
  local bytes = redis.call('HSTRLEN', session, 'head') + redis.call('HSTRLEN', session, 'arrays')
  redis.call('HINCRBY', k('totals'), 'bytes', -bytes)
  redis.call('HINCRBY', k('totals'), 'sessions', -1)
  redis.call('HINCRBY', k('totals'), 'trajectories', -redis.call('HGET', session, 'trajectories'))
  redis.call('DEL', session, k('rewards', id))
  redis.call('ZREM', k('sessions'), id)
  redis.call('ZREM', k('due'), id)
  redis.call('ZADD', k('removed'), now, id)
  gone = gone + 1
end
redis.call('DEL', k('group', key), k('members', key), k('all', key))
redis.call('ZREM', k('groups'), key)
redis.call('ZREM', k('groups', 'open'), key)
redis.call('ZADD', k('removed'), now, 'g:' .. key)
redis.call('HINCRBY', k('totals'), 'removed_sessions', gone)
return gone
"""
)

FORGET_UNIT = (
    _HEAD
    + r"""
local log, id = ARGV[3], ARGV[4]
local seq = redis.call('ZSCORE', k('units', log), id)
if seq then
  redis.call('XDEL', k('log', log), stream_id(tonumber(seq)))
  redis.call('ZREM', k('units', log), id)
  redis.call('HDEL', k('parts', log), id)
end
for at = 5, #ARGV do
  redis.call('ZREM', k('settled', ARGV[at]), id)
  redis.call('HDEL', k('settled_ms', ARGV[at]), id)
end
return 1
"""
)
