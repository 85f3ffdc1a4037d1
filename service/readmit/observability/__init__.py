"""Rules, alerts and dashboards as code: generated into ``alerts/`` and ``dashboards/``, and checked in there.

::

    python -m readmit.observability rules              # alerts/readmit.rules.yaml and readmit.alerts.yaml
    python -m readmit.observability dashboards         # dashboards/*.json
    python -m readmit.observability rules --check      # exit status 1 if what is checked in is not what is generated
"""
