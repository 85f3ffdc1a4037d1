"""Which weights an engine of this node serves, by its URL: what its process asked the weight cache for."""

from collections.abc import Mapping
from typing import Any

from yarl import URL

from readmit.gate.chronicle import Chronicle
from readmit.gate.process import listener
from readmit.gate.records import Records
from readmit.where import Where
from weightcache.journal import Journal
from weightcache.process import tree


def served_weights(url: str, where: Where) -> Mapping[str, Any]:
    """What is known of them, as fields of a `CacheConfig`; empty where the engine is none of this node's.

    Args:
        url: the engine's base URL.
        where: the node's folders and journal.
    """
    engine = listener(URL(url).host or "", URL(url).port or 80)
    if engine is None or not where.journal.exists():
        return {}
    journal = Journal(where.journal)
    where_started = "WHERE kind = 'process' AND name = 'spawned' AND slot IS NOT NULL ORDER BY id DESC LIMIT 100"
    started = journal.query(where_started)
    journal.close()
    slot = next((event.slot for event in started if engine.pid in tree(event.attributes["pid"])), None)
    if slot is None:
        return {}
    chronicle = Chronicle(where.journal, "", [slot], Records(None))
    chronicle.rewind()
    weights = chronicle.weights(slot) if chronicle.engine(slot) else {}
    chronicle.close()
    return weights
