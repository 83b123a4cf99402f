//! The manager's own metrics: how its nodes are, and how many alarms stand, so that whoever watches
//! metrics is alarmed by the same as who looks at the dashboard.

use crate::registry::{ClusterStatus, NodeState};
use crate::watching::alarms::alarms;
use crate::watching::overview::Severity;
use hecaton_node::children::processes::ProcessUse;
use prometheus_client::encoding::text;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::atomic::AtomicU64;

/// The line that ends an OpenMetrics text.
const END: &str = "# EOF\n";

/// A gauge for each value of one label.
type ByLabel = Family<[(&'static str, &'static str); 1], Gauge>;

/// The metrics, in the OpenMetrics text format, to be followed by others.
pub(crate) fn render(status: &ClusterStatus) -> String {
    let mut registry = Registry::with_prefix("hecaton_manager");
    let uptime = Gauge::<i64>::default();
    uptime.set((status.uptime_ms / 1000) as i64);
    registry.register("uptime_seconds", "Time since the manager started", uptime);
    let nodes = ByLabel::default();
    registry.register("nodes", "Nodes that are remembered", nodes.clone());
    for (state, word) in [(NodeState::Up, "up"), (NodeState::Silent, "silent")] {
        let count = status.nodes.iter().filter(|node| node.state == state).count();
        nodes.get_or_create(&[("state", word)]).set(count as i64);
    }
    let standing = ByLabel::default();
    registry.register("alarms", "Alarms that stand", standing.clone());
    let all = alarms(status);
    for (severity, word) in [
        (Severity::Critical, "critical"),
        (Severity::Warning, "warning"),
        (Severity::Notice, "notice"),
    ] {
        let count = all.iter().filter(|alarm| alarm.severity == severity).count();
        standing.get_or_create(&[("severity", word)]).set(count as i64);
    }
    if let Some(harvest) = &status.harvest {
        let (quota, counted) = (Gauge::<i64>::default(), Gauge::<i64>::default());
        quota.set(i64::try_from(harvest.quota).unwrap_or(i64::MAX));
        counted.set(i64::try_from(harvest.counted).unwrap_or(i64::MAX));
        registry.register("harvest_vms_quota", "Most harvest VMs of all nodes together", quota);
        registry.register("harvest_vms_counted", "Those that nodes have or may have", counted);
    }
    if let Some(takes) = ProcessUse::of(std::process::id()) {
        let (resident, cpu) = (Gauge::<i64>::default(), Counter::<f64, AtomicU64>::default());
        resident.set(takes.resident_bytes as i64);
        cpu.inc_by(takes.cpu_ms as f64 / 1000.0);
        registry.register("resident_bytes", "Memory of the manager's process", resident);
        registry.register("cpu_seconds", "Time that its threads have run", cpu);
    }
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("a String takes any text");
    text.truncate(text.len() - END.len());
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watching::overview::tests::{donor, node, status};

    #[test]
    fn nodes_and_alarms_are_counted() {
        let mut nodes = vec![node("a", vec![donor("a", 1)], vec![]), node("b", vec![], vec![])];
        nodes[1].state = NodeState::Silent;
        let text = render(&status(nodes));
        for line in [
            "hecaton_manager_uptime_seconds 60\n",
            "hecaton_manager_nodes{state=\"up\"} 1\n",
            "hecaton_manager_nodes{state=\"silent\"} 1\n",
            "hecaton_manager_alarms{severity=\"critical\"} 1\n",
            "hecaton_manager_alarms{severity=\"warning\"} 0\n",
        ] {
            assert!(text.contains(line), "no {line:?} in {text}");
        }
        assert!(text.contains("\nhecaton_manager_resident_bytes "), "{text}");
        assert!(text.contains("\nhecaton_manager_cpu_seconds_total "), "{text}");
        assert!(!text.contains(END));
    }
}
