"""Alerts. Four of them page: somebody waits, or is answered wrongly, and a person has to act now. The rest are tickets.

Every rare counter exists at 0 from the start, so ``increase`` sees its first event. Ages are computed here from points
in time, so what lasts is seen while it lasts.
"""

from typing import Any, Final, Literal

from readmit.observability.config import BURNS, FAULTS, Burn, Settings

Severity = Literal["page", "ticket"]
Alert = dict[str, Any]
Group = dict[str, Any]

_SLOT: Final = "slot {{ $labels.slot }} of {{ $labels.instance }}"
_DURATION: Final = "{{ $value | humanizeDuration }}"


class Alerts:
    """The alerts of a fleet.

    Args:
        settings: thresholds, and where the runbooks are.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def groups(self) -> list[Group]:
        """The groups of ``readmit.alerts.yaml``."""
        return [
            {"name": "readmit-before", "rules": [self._next_start_would_miss(), self._redundancy_lost()]},
            {"name": "readmit-recovery", "rules": self._recovery()},
            {"name": "readmit-cache", "rules": self._cache()},
            {"name": "readmit-slo", "rules": self._slo()},
            {"name": "readmit-telemetry", "rules": self._telemetry()},
        ]

    def _next_start_would_miss(self) -> Alert:
        return self._alert(
            "ReadmitNextStartWouldMiss",
            "ticket",
            'weightcache_next_start_would_hit{reason!="daemon_loading"} == 0\n'
            "unless on (job, instance, slot) readmit_slot_wanted == 0",
            f"The next start of {_SLOT} would be a cold one: {{{{ $labels.reason }}}}",
            "Nothing is wrong yet. If the engine died now, the next would load from disk. Make its weights resident.",
            wait="5m",
        )

    def _redundancy_lost(self) -> Alert:
        wanted = "sum by (job, instance) (readmit_slot_wanted)"
        return self._alert(
            "ReadmitRedundancyLost",
            "ticket",
            f"(sum by (job, instance) (readmit_slot_ready) < {wanted}) and {wanted} >= 2",
            "{{ $labels.instance }} has {{ $value }} ready slots, fewer than it is meant to have",
            "The node still serves unless the value is 0, but the next fault may be an outage.",
            wait="5m",
        )

    def _recovery(self) -> list[Alert]:
        settings = self._settings
        overdue = "time() - (readmit_recovery_deadline_timestamp_seconds > 0) > 0"
        phase = "(time() - (readmit_recovery_phase_started_timestamp_seconds > 0))"
        faults = f'readmit_recoveries_started_total{{cause=~"{"|".join(FAULTS)}"}}'
        recoveries = f"sum by (job, instance) (round(increase({faults}[30m])))"
        wrong = 'readmit_probes_total{result="wrong"}'
        ejected = 'readmit_recoveries_started_total{cause="wrong_answer"}'
        nobody = "readmit_slot_wanted == 1 and readmit_slot_ready == 0"
        return [
            self._alert(
                "ReadmitRecoveryOverdue",
                "page",
                overdue,
                f"The recovery of {_SLOT} is {_DURATION} past its deadline and still open",
                "It should have given a correct answer by now, by the path it is on. This fires before the recovery "
                "ends, and a crash loop does not reset it.",
            ),
            self._alert(
                "ReadmitNobodyRecovers",
                "page",
                f"{nobody} and readmit_recovery_started_timestamp_seconds == 0",
                f"Nobody recovers {_SLOT}, which is not ready",
                "Its recovery was abandoned: the keeper gave up, or the engine said that trying again cannot help.",
                wait="2m",
            ),
            self._alert(
                "ReadmitWrongAnswer",
                "page",
                f"sum by (job, instance) (increase({ejected}[15m])) > 0\nor\n"
                f"sum by (job, instance) (round(increase({wrong}[15m]))) >= {settings.wrong_answers}",
                "{{ $labels.instance }} answers known questions wrongly",
                "An engine lost readiness for wrong answers, or one does not become ready because of them. Clients may "
                "have been answered wrongly since its last correct verification.",
            ),
            self._alert(
                "ReadmitRecoveryStuck",
                "ticket",
                f"{phase}\n* on (job, instance, slot) group_right () (readmit_recovery_phase == 1)\n"
                "> on (job, instance, phase) group_left () readmit_slo_phase_limit_seconds",
                f"In {{{{ $labels.phase }}}} for {_DURATION}: the recovery of {_SLOT}",
                "No phase of a good recovery takes so long; the whole recovery may still be within its deadline.",
            ),
            self._alert(
                "ReadmitRecoveryLoop",
                "ticket",
                f"max by (job, instance) (readmit_recovery_attempts) >= {settings.attempts}\nor\n"
                f"{recoveries} >= {settings.recoveries}",
                "Engines of {{ $labels.instance }} keep dying: {{ $value }} attempts, or recoveries in 30 minutes",
                "They die before they are ready, or soon after. Fast recoveries hide such a loop from averages.",
            ),
            self._alert(
                "ReadmitRecoveryFailed",
                "ticket",
                "increase(readmit_recoveries_failed_total[15m]) > 0",
                "A recovery of {{ $labels.instance }} failed",
                "The slot is not ready, and was not stopped on purpose. ReadmitNobodyRecovers pages if it stays so.",
            ),
            self._alert(
                "ReadmitServiceOutage",
                "ticket",
                "time() - (readmit_service_outage_started_timestamp_seconds > 0)\n"
                "> on (job, instance) readmit_slo_outage_threshold_seconds",
                f"No slot of {{{{ $labels.instance }}}} has been ready for {_DURATION}",
                "Longer than promised. With a standby an engine's fault makes no outage at all.",
            ),
        ]

    def _cache(self) -> list[Alert]:
        settings = self._settings
        cold = "readmit_unexpected_cold_starts_total"
        lookups = "job_result:weightcache_lookups:increase7d"
        lost = 'weightcache_misses_total{reason="residency_lost"}'
        refused = 'weightcache_misses_total{reason="quant_not_allowed"}'
        return [
            self._alert(
                "ReadmitColdStart",
                "ticket",
                f"sum by (job, instance, reason) (increase({cold}[15m])) > 0",
                "A recovery of {{ $labels.instance }} read its weights from disk: {{ $labels.reason }}",
                "Resident weights were expected and not used. First starts and scale-outs do not count.",
            ),
            self._alert(
                "ReadmitColdStartsAcrossFleet",
                "page",
                f"sum by (job) (round(increase({cold}[1h]))) >= {settings.cold_starts}",
                "{{ $value }} cold starts in an hour across {{ $labels.job }}",
                "So many at once have one cause: a roll-out that changed the fingerprint, a changed checkpoint, lost "
                "nodes. Stop the roll-out before the rest of the fleet starts cold.",
            ),
            self._alert(
                "ReadmitQuantNotAllowed",
                "ticket",
                f"sum by (job, instance, detail) (increase({refused}[1h])) > 0",
                "{{ $labels.instance }} uses the cache for a quantisation that cannot travel: {{ $labels.detail }}",
                "Every start of this model will miss. It should run with mode off, on purpose.",
            ),
            self._alert(
                "ReadmitResidencyLost",
                "ticket",
                f"sum by (job, instance, detail) (increase({lost}[15m])) > 0\nor\n"
                'sum by (job, instance) (increase(weightcache_releases_total{how="lost"}[15m])) > 0',
                "Resident weights of {{ $labels.instance }} are lost{{ with $labels.detail }}: {{ . }}{{ end }}",
                "The node, its driver, a GPU or the keeper took them along. This is disaster recovery, not a fast one.",
            ),
            self._alert(
                "ReadmitHitRateLow",
                "ticket",
                f'sum by (job) ({lookups}{{result="hit"}})\n'
                f"/ (sum by (job) ({lookups}) >= {settings.hit_rate_attaches})\n< {settings.hit_rate}",
                "Only {{ $value | humanizePercentage }} of the attaches of {{ $labels.job }} mapped resident weights",
                f"Over the last 7 days, of at least {settings.hit_rate_attaches} attaches.",
                wait="15m",
            ),
        ]

    def _slo(self) -> list[Alert]:
        late = 'sum by (job, path) (job_path_class:readmit_slo_events:sum{class=~"late|failed"})'
        return [
            *(self._burn(burn) for burn in BURNS),
            self._alert(
                "ReadmitLateBudgetExhausted",
                "ticket",
                f"{late}\n> on (job, path) job_path:readmit_slo_late_events:sum",
                "{{ $value }} recoveries of {{ $labels.job }} by {{ $labels.path }} were late or failed in 90 days",
                "More whole events than promised. Spend the next effort on what made them late, not on features.",
            ),
        ]

    def _burn(self, burn: Burn) -> Alert:
        def fast(window: str) -> str:
            ratio = f"job_clock:readmit_burned_seconds:rate{window} / job_clock:readmit_observed_seconds:rate{window}"
            return f"{ratio} > {burn.factor:g} * (1 - job_clock:readmit_slo_ready_ratio:max)"

        return self._alert(
            "ReadmitReadinessBudgetBurn",
            "ticket",
            f"({fast(burn.long)})\nand\n({fast(burn.short)})",
            "{{ $labels.job }} burns its {{ $labels.clock }} readiness budget over "
            f"{burn.factor:g} times too fast ({burn.long})",
            "Not ready for {{ $value | humanizePercentage }} of the time, without planned recoveries within their "
            "deadline. Every single recovery may have been in time.",
            long=burn.long,
            short=burn.short,
        )

    def _telemetry(self) -> list[Alert]:
        job = self._settings.job
        return [
            self._alert(
                "ReadmitDaemonAbsent",
                "ticket",
                f'up{{job="{job}"}} == 0',
                "The weight cache daemon of {{ $labels.instance }} does not answer",
                "Engines serve on, and weights stay with the keeper; an engine that starts now waits or misses.",
                wait="2m",
            ),
            self._alert(
                "ReadmitTelemetryAbsent",
                "ticket",
                f'absent(up{{job="{job}"}})\nor\n(up{{job="{job}"}} == 1 unless on (job, instance) readmit_build_info)',
                "No readmit metrics of {{ $labels.job }} {{ $labels.instance }}",
                "Nothing is scraped, or what is scraped is not readmit. No other alert here can fire.",
                wait="5m",
            ),
            self._alert(
                "ReadmitJournalDegraded",
                "ticket",
                "readmit_journal_degraded == 1",
                "The journal of {{ $labels.instance }} takes no events; they wait in spool files or are lost",
                "Recoveries go on unharmed. What is not journaled is missing in every figure.",
                wait="5m",
            ),
        ]

    def _alert(
        self, name: str, severity: Severity, expr: str, summary: str, text: str, *, wait: str = "", **labels: str
    ) -> Alert:
        rule: Alert = {"alert": name, "expr": expr}
        if wait:
            rule["for"] = wait
        rule["labels"] = {"severity": severity, **labels}
        url = f"{self._settings.runbooks}{name}.md"
        rule["annotations"] = {"summary": summary, "description": text, "runbook_url": url}
        return rule
