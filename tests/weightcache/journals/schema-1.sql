BEGIN TRANSACTION;
CREATE TABLE events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    boot_id TEXT NOT NULL,
    boottime_ns INTEGER NOT NULL,
    wall_ns INTEGER NOT NULL,
    node TEXT NOT NULL,
    slot TEXT,
    episode TEXT,
    attempt INTEGER,
    rank INTEGER,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    attributes TEXT NOT NULL
);
INSERT INTO "events" VALUES(1,'boot-1',100000000000,1700000100000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',NULL,NULL,'episode_open','crash','{"fault_boottime_ns": 100000000000}');
INSERT INTO "events" VALUES(2,'boot-1',100000000000,1700000100000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',NULL,NULL,'phase_begin','detect','{}');
INSERT INTO "events" VALUES(3,'boot-1',100500000000,1700000100500000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',NULL,NULL,'phase_end','detect','{}');
INSERT INTO "events" VALUES(4,'boot-1',100500000000,1700000100500000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',NULL,NULL,'phase_begin','backoff','{}');
INSERT INTO "events" VALUES(5,'boot-1',101500000000,1700000101500000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',NULL,NULL,'phase_end','backoff','{}');
INSERT INTO "events" VALUES(6,'boot-1',101500000000,1700000101500000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'attempt_start','','{"command": ["serve"], "starting_state": {"page_cache": "warm"}}');
INSERT INTO "events" VALUES(7,'boot-1',101500000000,1700000101500000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'phase_begin','spawn','{}');
INSERT INTO "events" VALUES(8,'boot-1',101600000000,1700000101600000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'phase_end','spawn','{}');
INSERT INTO "events" VALUES(9,'boot-1',101600000000,1700000101600000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'process','spawned','{"process": "engine", "pid": 77, "start_ticks": 10160}');
INSERT INTO "events" VALUES(10,'boot-1',101600000000,1700000101600000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'phase_begin','import','{}');
INSERT INTO "events" VALUES(11,'boot-1',105000000000,1700000105000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'phase_end','import','{}');
INSERT INTO "events" VALUES(12,'boot-1',106000000000,1700000106000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,0,'phase_begin','load_weights','{}');
INSERT INTO "events" VALUES(13,'boot-1',108000000000,1700000108000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,0,'phase_end','load_weights','{}');
INSERT INTO "events" VALUES(14,'boot-1',106200000000,1700000106200000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,0,'phase_begin','load_weights.map','{}');
INSERT INTO "events" VALUES(15,'boot-1',107000000000,1700000107000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,0,'phase_end','load_weights.map','{}');
INSERT INTO "events" VALUES(16,'boot-1',106100000000,1700000106100000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,0,'lookup','hit','{}');
INSERT INTO "events" VALUES(17,'boot-1',109000000000,1700000109000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'phase_begin','semantic_verify','{}');
INSERT INTO "events" VALUES(18,'boot-1',110000000000,1700000110000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'phase_end','semantic_verify','{}');
INSERT INTO "events" VALUES(19,'boot-1',110000000000,1700000110000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'attempt_end','ready','{}');
INSERT INTO "events" VALUES(20,'boot-1',110000000000,1700000110000000000,'node','a','eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee',1,NULL,'episode_close','ready','{"verified": true, "generation": "g1"}');
CREATE INDEX events_by_slot ON events (slot, kind, id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('events',20);
COMMIT;
PRAGMA user_version=1;
