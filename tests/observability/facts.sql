-- What a journal of several nodes says, by SQL alone: nothing here replays events or shares code with what is tested.
-- Tables hold the whole past; views show it as of `moment`. Times are nanoseconds on each node's clock: Unix time as
-- of the boot's first event, boottime from there.

CREATE TEMP TABLE e AS
  SELECT id, node, slot, episode, attempt, rank, kind, name, attributes, offset_ns, boottime_ns + offset_ns AS at_ns
  FROM events
  JOIN (SELECT node, boot_id, wall_ns - boottime_ns AS offset_ns, min(id) FROM events GROUP BY node, boot_id)
    USING (node, boot_id);
CREATE INDEX temp.e_by_kind ON e (kind, node, episode);
CREATE INDEX temp.e_by_id ON e (id);
CREATE TEMP TABLE nodes AS SELECT DISTINCT node FROM e;

-- Recoveries. ---------------------------------------------------------------------------------------------------------

CREATE TEMP TABLE episodes AS
WITH opened AS (
  SELECT node, slot, episode, coalesce(json_extract(attributes, '$.cause'), name) AS cause, at_ns AS opened_ns,
         id AS opened_id,
         min(at_ns, coalesce(json_extract(attributes, '$.fault_boottime_ns') + offset_ns, at_ns)) AS told_ns
  FROM e WHERE kind = 'episode_open'
), closed AS (
  SELECT node, episode, name AS outcome, at_ns AS closed_ns, min(id) AS closed_id,
         json_extract(attributes, '$.verified') AS verified, json_extract(attributes, '$.path') AS told_path,
         name = 'abandoned' AND coalesce(json_extract(attributes, '$.reason') = 'stopped', 0) AS stopped
  FROM e WHERE kind = 'episode_close' GROUP BY node, episode
)
SELECT o.*, outcome, closed_ns, closed_id, verified, told_path, stopped, cause IN (SELECT cause FROM planned_causes) AS planned,
       max(told_ns, coalesce(lag(closed_ns) OVER past, 0)) AS fault_ns, lead(opened_id) OVER past AS next_opened_id, (
         SELECT p.episode FROM opened p LEFT JOIN closed c USING (node, episode)
         WHERE p.node = o.node AND p.slot = o.slot AND p.opened_id < o.opened_id AND c.told_path IS NOT 'standby'
         ORDER BY p.opened_id DESC LIMIT 1) AS previous  -- a takeover says nothing of how fast the slot's engine is
FROM opened o LEFT JOIN closed USING (node, episode) WINDOW past AS (PARTITION BY o.node, o.slot ORDER BY opened_id);
CREATE INDEX temp.episodes_by_id ON episodes (node, episode);

CREATE TEMP TABLE lookups AS
  SELECT id, node, slot, episode, attempt, coalesce(rank, 0) AS r, name AS result, at_ns,
         json_extract(attributes, '$.reason') AS reason, json_extract(attributes, '$.detail') AS detail,
         json_extract(attributes, '$.config') AS config
  FROM e WHERE kind = 'lookup';
-- What each rank asked for, or published, which it will ask for.
CREATE TEMP TABLE questions AS
  SELECT id, node, slot, r, at_ns, result, config FROM lookups WHERE config IS NOT NULL OR result = 'off'
  UNION ALL
  SELECT id, node, slot, coalesce(rank, 0), at_ns, name, json_extract(attributes, '$.config') FROM e
  WHERE kind = 'publish' AND slot IS NOT NULL AND json_extract(attributes, '$.config') IS NOT NULL;
CREATE TEMP TABLE loading AS
  SELECT node, episode, attempt, coalesce(rank, 0) AS r, min(at_ns) AS at_ns
  FROM e WHERE kind = 'phase_begin' AND name = 'load_weights' GROUP BY 1, 2, 3, 4;

-- The path each episode is known to be on since when.
CREATE TEMP TABLE known AS
WITH news AS (
  SELECT node, episode, at_ns FROM lookups UNION SELECT node, episode, at_ns FROM loading
), ranks AS (
  SELECT n.node, n.episode, n.at_ns, l.attempt, l.r,
         CASE WHEN sum(result = 'miss') THEN 'miss' ELSE max(result) END AS result
  FROM news n JOIN lookups l ON (l.node, l.episode) = (n.node, n.episode) AND l.at_ns <= n.at_ns GROUP BY 1, 2, 3, 4, 5
), attempts AS (
  SELECT node, episode, at_ns,
         CASE WHEN count(DISTINCT result) > 1 THEN CASE WHEN sum(result = 'hit') THEN 'partial' ELSE 'miss' END
              WHEN max(result) = 'hit' AND count(*) < (
                SELECT count(*) FROM loading l
                WHERE (l.node, l.episode, l.attempt) = (ranks.node, ranks.episode, ranks.attempt)
                  AND l.at_ns <= ranks.at_ns) THEN NULL
              ELSE max(result) END AS path
  FROM ranks GROUP BY node, episode, at_ns, attempt
)
SELECT node, episode, at_ns,
       CASE count(DISTINCT path) WHEN 0 THEN 'unknown' WHEN 1 THEN max(path)
            ELSE CASE WHEN sum(path IN ('hit', 'partial')) THEN 'partial' ELSE 'miss' END END AS path
FROM attempts GROUP BY node, episode, at_ns;
CREATE INDEX temp.known_by_episode ON known (node, episode, at_ns);

CREATE TEMP TABLE final_paths AS
  SELECT node, episode, coalesce(told_path,
         (SELECT path FROM known k WHERE (k.node, k.episode) = (o.node, o.episode) ORDER BY at_ns DESC LIMIT 1),
                  'unknown') AS path
  FROM episodes o;
CREATE INDEX temp.final_paths_by_episode ON final_paths (node, episode);

-- The path by whose threshold each episode is judged until it is known better.
CREATE TEMP TABLE hopes AS
  SELECT o.node, o.episode,
         CASE WHEN o.previous IS NULL THEN 'miss' WHEN f.path = 'off' THEN 'off' ELSE 'hit' END AS hope
  FROM episodes o LEFT JOIN final_paths f ON (f.node, f.episode) = (o.node, o.previous);

CREATE TEMP TABLE cold_starts AS
  SELECT node, episode, reason, coalesce(detail, '') AS detail FROM (
    SELECT node, episode, reason, detail,
           row_number() OVER (PARTITION BY node, episode ORDER BY attempt DESC, r, id) AS place
    FROM lookups WHERE result = 'miss') WHERE place = 1;

-- Phases. -------------------------------------------------------------------------------------------------------------

CREATE TEMP TABLE attempts AS
  SELECT node, episode, attempt, min(at_ns) AS heard_ns,
         min(CASE kind WHEN 'attempt_start' THEN at_ns END) AS started_ns,
         min(CASE WHEN kind = 'attempt_end' OR (kind = 'process' AND name = 'exited'
                       AND json_extract(attributes, '$.process') = 'engine') THEN at_ns END) AS ended_ns
  FROM e WHERE attempt IS NOT NULL AND episode IS NOT NULL AND kind NOT IN ('phase_begin', 'phase_end')
  GROUP BY 1, 2, 3;

-- An end closes the latest begin that is open.
CREATE TEMP TABLE intervals AS
WITH marks AS (
  SELECT node, slot, episode, attempt, rank, name, at_ns, id, kind, sum(CASE kind WHEN 'phase_begin' THEN 1 ELSE -1 END)
         OVER (PARTITION BY node, episode, attempt, rank, name ORDER BY at_ns, id ROWS UNBOUNDED PRECEDING) AS depth
  FROM e WHERE kind IN ('phase_begin', 'phase_end') AND episode IS NOT NULL AND instr(name, '.') = 0
)
SELECT node, slot, episode, attempt, rank, name AS phase, place, at_ns AS begin_ns, (
         SELECT min(f.at_ns) FROM marks f WHERE f.kind = 'phase_end' AND f.node = b.node AND f.episode = b.episode
         AND f.attempt IS b.attempt AND f.rank IS b.rank AND f.name = b.name AND f.depth = b.depth - 1
         AND (f.at_ns, f.id) > (b.at_ns, b.id)) AS end_ns
FROM marks b JOIN phases ON phase = name WHERE kind = 'phase_begin';
CREATE INDEX temp.intervals_by_episode ON intervals (node, episode);

-- The chain of a closed episode: intervals of no rank in particular, and of each attempt's slowest rank.
CREATE TEMP TABLE chain AS
WITH limits AS (
  SELECT node, episode, attempt, min(coalesce(ended_ns, closed_ns), closed_ns, coalesce(
           lead(started_ns) OVER (PARTITION BY node, episode ORDER BY attempt), closed_ns)) AS limit_ns
  FROM attempts JOIN episodes USING (node, episode) WHERE closed_ns IS NOT NULL
), bounded AS (
  SELECT i.*, max(begin_ns, min(coalesce(end_ns, limit_ns, closed_ns), coalesce(limit_ns, closed_ns))) AS over_ns
  FROM intervals i JOIN episodes o USING (node, episode) LEFT JOIN limits l
    ON (l.node, l.episode, l.attempt) = (i.node, i.episode, i.attempt)
  WHERE closed_ns IS NOT NULL
), slowest AS (
  SELECT node, episode, attempt, rank FROM (
    SELECT node, episode, attempt, rank,
           row_number() OVER (PARTITION BY node, episode, attempt ORDER BY max(over_ns) DESC, rank) AS place
    FROM bounded WHERE rank IS NOT NULL GROUP BY node, episode, attempt, rank) WHERE place = 1
), kept AS (
  SELECT b.* FROM bounded b LEFT JOIN slowest s ON s.node = b.node AND s.episode = b.episode AND s.attempt IS b.attempt
  WHERE b.rank IS NULL OR b.rank = s.rank
)
SELECT k.node, k.episode, phase, place, begin_ns, CASE WHEN end_ns IS NOT NULL THEN over_ns ELSE min(over_ns, coalesce((
         SELECT min(f.begin_ns) FROM kept f WHERE f.node = k.node AND f.episode = k.episode
         AND (k.attempt IS NULL OR f.attempt = k.attempt) AND f.begin_ns > k.begin_ns AND f.place > k.place), over_ns))
       END AS end_ns
FROM kept k;
CREATE INDEX temp.chain_by_episode ON chain (node, episode);

CREATE TEMP TABLE phase_seconds AS
WITH ends AS (
  SELECT node, episode, fault_ns, closed_ns FROM episodes WHERE closed_ns IS NOT NULL
), edges AS (
  SELECT node, episode, fault_ns AS at_ns FROM ends UNION SELECT node, episode, closed_ns FROM ends
  UNION SELECT node, episode, begin_ns FROM chain JOIN ends USING (node, episode)
    WHERE begin_ns > fault_ns AND begin_ns < closed_ns
  UNION SELECT node, episode, end_ns FROM chain JOIN ends USING (node, episode)
    WHERE end_ns > fault_ns AND end_ns < closed_ns
), pieces AS (
  SELECT node, episode, at_ns AS begin_ns, lead(at_ns) OVER (PARTITION BY node, episode ORDER BY at_ns) AS end_ns
  FROM edges
)
SELECT node, episode, phase, sum(end_ns - begin_ns) / 1e9 AS seconds FROM (
  SELECT node, episode, begin_ns, end_ns, coalesce((
           SELECT phase FROM chain c WHERE c.node = p.node AND c.episode = p.episode
           AND c.begin_ns <= p.begin_ns AND c.end_ns >= p.end_ns ORDER BY begin_ns DESC, place DESC LIMIT 1),
         'unattributed') AS phase
  FROM pieces p WHERE end_ns IS NOT NULL)
GROUP BY 1, 2, 3;

-- Readiness. ----------------------------------------------------------------------------------------------------------

-- Turns of each slot: what it is from then on, and until when unready time is a planned recovery's.
CREATE TEMP TABLE turns AS
WITH exits AS (
  SELECT node, slot, min(id) AS id, at_ns, episode_id FROM (
    SELECT e.node, e.slot, e.id, e.at_ns, o.episode AS episode_id FROM e JOIN episodes o
      ON o.node = e.node AND o.slot = e.slot AND e.id > o.closed_id AND e.id < coalesce(o.next_opened_id, 9e18)
    WHERE e.kind = 'process' AND e.name = 'exited' AND o.outcome = 'ready'
      AND json_extract(e.attributes, '$.process') = 'engine') GROUP BY node, slot, episode_id
), found AS (
  SELECT o.node, o.slot, opened_id AS id, fault_ns AS at_ns, opened_ns AS known_ns, 'unready' AS state,
         planned * (fault_ns + seconds * 1000000000) AS grace_ns
  FROM episodes o JOIN hopes USING (node, episode) JOIN thresholds t ON t.path = hope
  UNION ALL
  SELECT o.node, o.slot, l.id, l.at_ns, l.at_ns, 'unready', fault_ns + seconds * 1000000000
  FROM episodes o JOIN lookups l USING (node, episode) JOIN hopes USING (node, episode)
  JOIN known k ON (k.node, k.episode, k.at_ns) = (l.node, l.episode, l.at_ns)
  JOIN thresholds t ON t.path = CASE k.path WHEN 'unknown' THEN hope ELSE k.path END
  WHERE planned AND l.id < coalesce(closed_id, 9e18)
  UNION ALL
  SELECT o.node, o.slot, closed_id, closed_ns, closed_ns,
         CASE WHEN outcome = 'ready' THEN 'ready' WHEN stopped THEN 'stopped' ELSE 'unready' END,
         planned * (fault_ns + seconds * 1000000000)
  FROM episodes o JOIN final_paths f USING (node, episode) JOIN thresholds t ON t.path = f.path
  WHERE closed_id IS NOT NULL
  UNION ALL
  SELECT node, slot, id, at_ns, at_ns, 'stopped', 0 FROM exits
  UNION ALL  -- a keeper that was told to end, after a recovery that it had given up
  SELECT o.node, o.slot, e.id, e.at_ns, e.at_ns, 'stopped', 0 FROM e JOIN episodes o ON o.node = e.node
  WHERE e.kind = 'process' AND e.name = 'exited' AND json_extract(e.attributes, '$.process') = 'keeper'
    AND json_extract(e.attributes, '$.exit_code') = 0 AND o.outcome != 'ready' AND NOT o.stopped
    AND e.id > o.closed_id AND e.id < coalesce(o.next_opened_id, 9e18)
  UNION ALL  -- a slot that was stopped on purpose, after such a recovery
  SELECT o.node, o.slot, e.id, e.at_ns, e.at_ns, 'stopped', 0 FROM e JOIN episodes o ON (o.node, o.slot) = (e.node, e.slot)
  WHERE e.kind = 'process' AND e.name = 'stopped' AND o.outcome != 'ready' AND NOT o.stopped
    AND e.id > o.closed_id AND e.id < coalesce(o.next_opened_id, 9e18)
)
SELECT node, slot, id, max(at_ns) OVER (PARTITION BY node, slot ORDER BY id) AS at_ns, known_ns, state, grace_ns
FROM found;

CREATE TEMP TABLE slot_pieces AS
  SELECT node, slot, id, at_ns AS begin_ns, known_ns, state, grace_ns,
         lead(at_ns) OVER line AS end_ns, lead(known_ns) OVER line AS left_ns
  FROM turns WINDOW line AS (PARTITION BY node, slot ORDER BY id);

-- The node's, from those of its slots: at each turn of one, what all of them are then.
CREATE TEMP TABLE service_pieces AS
WITH latest AS (
  SELECT b.node, b.id, b.known_ns, b.at_ns, s.slot, s.state, s.grace_ns, max(s.id)
  FROM turns b JOIN slot_pieces s ON s.node = b.node AND s.id <= b.id GROUP BY b.node, b.id, s.slot
), states AS (
  SELECT node, id, known_ns, at_ns, min(CASE state WHEN 'unready' THEN grace_ns END) AS grace_ns,
         CASE WHEN sum(state = 'ready') THEN 'ready' WHEN sum(state = 'unready') THEN 'unready'
              ELSE 'stopped' END AS state
  FROM latest GROUP BY node, id
), placed AS (
  SELECT *, max(at_ns) OVER (PARTITION BY node ORDER BY id) AS begin_ns FROM states
)
SELECT node, id, begin_ns, known_ns, state, coalesce(grace_ns, 0) AS grace_ns, lead(begin_ns) OVER line AS end_ns
FROM placed WINDOW line AS (PARTITION BY node ORDER BY id);

CREATE TEMP TABLE clocks AS
  SELECT 'slot' AS clock, node, slot, begin_ns, end_ns, known_ns, state, grace_ns FROM slot_pieces
  UNION ALL SELECT 'service', node, NULL, begin_ns, end_ns, known_ns, state, grace_ns FROM service_pieces;

-- What is resident. ---------------------------------------------------------------------------------------------------

CREATE TEMP TABLE daemons AS
  SELECT id, node, at_ns, name AS how, attributes FROM e
  WHERE kind = 'process' AND name IN ('started', 'readopted') AND json_extract(attributes, '$.process') = 'daemon';

CREATE TEMP TABLE endings AS  -- of a generation or a lease, by what an event says of it
  SELECT id, node, kind, at_ns, json_extract(attributes, iif(kind = 'lease_close', '$.lease', '$.generation')) AS what
  FROM e WHERE kind IN ('release', 'publish', 'lease_close') AND name != 'begin';
CREATE INDEX temp.endings_by_what ON endings (node, what, id);

CREATE TEMP TABLE generations AS
  SELECT id, node, at_ns AS begin_ns, json_extract(attributes, '$.generation') AS generation,
         json_extract(attributes, '$.bytes') AS bytes, json_extract(attributes, '$.config') AS config, (
           SELECT min(x.id) FROM endings x
           WHERE x.node = p.node AND x.what = json_extract(p.attributes, '$.generation') AND x.id > p.id) AS said_id, (
           SELECT min(d.id) FROM daemons d WHERE d.node = p.node AND d.id > p.id AND NOT EXISTS (
             SELECT 1 FROM json_each(d.attributes, '$.generations')
             WHERE value = json_extract(p.attributes, '$.generation'))) AS lost_id
  FROM e p WHERE kind = 'publish' AND name = 'published';
ALTER TABLE generations ADD COLUMN end_id INTEGER;
UPDATE generations SET end_id = nullif(min(coalesce(said_id, 9e18), coalesce(lost_id, 9e18)), 9e18);
ALTER TABLE generations ADD COLUMN end_ns INTEGER;
UPDATE generations SET end_ns = (SELECT at_ns FROM e WHERE e.id = end_id);

CREATE TEMP TABLE leases AS
  SELECT g.id AS generation_id, l.node, l.at_ns AS begin_ns, (
           SELECT min(x.id) FROM endings x
           WHERE x.node = l.node AND x.what = json_extract(l.attributes, '$.lease') AND x.id > l.id) AS said_id, (
           SELECT min(d.id) FROM daemons d WHERE d.node = l.node AND d.id > l.id AND NOT EXISTS (
             SELECT 1 FROM json_each(d.attributes, '$.lease_names')
             WHERE value = json_extract(l.attributes, '$.lease'))) AS lost_id, g.end_id AS gone_id
  FROM e l JOIN generations g ON g.node = l.node AND g.generation = json_extract(l.attributes, '$.generation')
    AND l.id > g.id AND l.id < coalesce(g.end_id, 9e18)
  WHERE kind = 'lease_open';
ALTER TABLE leases ADD COLUMN end_ns INTEGER;
UPDATE leases SET end_ns = (SELECT at_ns FROM e
  WHERE e.id = min(coalesce(said_id, 9e18), coalesce(lost_id, 9e18), coalesce(gone_id, 9e18)));

-- As of a moment. -----------------------------------------------------------------------------------------------------

CREATE TEMP TABLE moment (now_ns INTEGER);
INSERT INTO moment VALUES (0);

CREATE TEMP VIEW standing AS
  SELECT o.node, o.slot, o.episode, cause, planned, fault_ns, opened_ns, closed_ns <= now_ns AS over, outcome, verified, stopped,
         closed_ns, now_ns, previous, coalesce(CASE WHEN closed_ns <= now_ns THEN told_path END, (
           SELECT path FROM known k WHERE k.node = o.node AND k.episode = o.episode AND k.at_ns <= now_ns
           ORDER BY at_ns DESC LIMIT 1), 'unknown') AS path,
         (min(coalesce(closed_ns, now_ns), now_ns) - fault_ns) / 1e9 AS seconds
  FROM episodes o, moment WHERE opened_ns <= now_ns;
CREATE TEMP VIEW recoveries AS SELECT * FROM standing WHERE over;
CREATE TEMP VIEW still AS
  SELECT s.*, fault_ns / 1e9 + t.seconds AS deadline_s FROM standing s JOIN hopes USING (node, episode)
  JOIN thresholds t ON t.path = CASE s.path WHEN 'unknown' THEN hope ELSE s.path END
  WHERE coalesce(over, 0) = 0;
CREATE TEMP VIEW slots AS
  SELECT node, slot, state FROM slot_pieces, moment
  WHERE known_ns <= now_ns AND coalesce(left_ns, 9e18) > now_ns;
CREATE TEMP VIEW stages AS
  SELECT node, slot, phase, place, begin_ns FROM (
    SELECT i.node, s.slot, phase, place, begin_ns,
           row_number() OVER (PARTITION BY i.node, s.slot ORDER BY begin_ns DESC, place DESC) AS rank
    FROM still s JOIN intervals i USING (node, episode)
    WHERE begin_ns <= now_ns AND coalesce(end_ns, 9e18) > now_ns AND NOT EXISTS (
      SELECT 1 FROM attempts a WHERE a.node = i.node AND a.episode = i.episode AND a.attempt = i.attempt
      AND a.ended_ns <= now_ns)) WHERE rank = 1;
CREATE TEMP VIEW resident AS
  SELECT g.* FROM generations g, moment WHERE begin_ns <= now_ns AND coalesce(end_ns, 9e18) > now_ns;
CREATE TEMP VIEW verdicts AS
WITH asked AS (
  SELECT node, slot, r, config FROM (
    SELECT node, slot, r, config, result, row_number() OVER (PARTITION BY node, slot, r ORDER BY id DESC) AS place
    FROM questions, moment WHERE at_ns <= now_ns)
  WHERE place = 1 AND result != 'off'
)
SELECT node, slot, min(hit) AS hit, coalesce(max(reason), '') AS reason FROM (
  SELECT node, slot, r, EXISTS (SELECT 1 FROM resident g WHERE g.node = a.node AND g.config = a.config) AS hit,
         CASE WHEN EXISTS (SELECT 1 FROM resident g WHERE g.node = a.node AND g.config = a.config) THEN NULL
              WHEN EXISTS (SELECT 1 FROM resident g WHERE g.node = a.node
                AND json_extract(g.config, '$.model_path') = json_extract(a.config, '$.model_path')
                AND json_extract(g.config, '$.tp_rank') = json_extract(a.config, '$.tp_rank')) THEN 'fingerprint'
              ELSE 'absent' END AS reason
  FROM asked a) GROUP BY node, slot;
