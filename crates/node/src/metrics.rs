//! Node reports as metrics for Prometheus, in the OpenMetrics text format.
//!
//! The reports are the only source: a manager shows all nodes in the same way as a node shows
//! itself. Latencies are gauges with a `quantile` label, because
//! what a pager reports are quantiles of its whole life and not buckets.

use crate::donors::{DonorReport, DonorState};
use crate::pagers::ConsumerReport;
use crate::report::NodeReport;
use hecaton_donor::prometheus_text;
use hecaton_pager::{Latency, Stats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use std::fmt;

/// The media type of [`render`]'s text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The line that ends an OpenMetrics text.
const END: &str = "# EOF\n";

/// The metrics of some nodes, with those of their donors as the donors themselves name them.
pub fn render(nodes: &[NodeReport]) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Nodes(nodes.to_vec())));
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("a String takes any text");
    let donors = nodes.iter().flat_map(|node| &node.donors);
    let snapshots = donors.filter_map(|donor| donor.stats.clone()).collect();
    text.truncate(text.len() - END.len());
    text + &prometheus_text(snapshots)
}

/// A metric of a `T`: name without `_total`, help, kind, and how it is read.
struct Metric<T>(&'static str, &'static str, Kind, fn(&T) -> f64);

#[derive(Clone, Copy)]
enum Kind {
    Counter,
    Gauge,
}
use Kind::{Counter, Gauge};

const NODE: &[Metric<NodeReport>] = &[
    Metric("hecaton_node_memory_bytes", "Memory of the host", Gauge, |node| {
        node.host.memory_bytes as f64
    }),
    Metric("hecaton_node_available_bytes", "Memory of the host that is free to use", Gauge, |n| {
        n.host.available_bytes as f64
    }),
    Metric("hecaton_node_consumers", "Consumers that borrow through the node", Gauge, |node| {
        node.consumers.len() as f64
    }),
];

const DONOR: &[Metric<DonorReport>] = &[
    Metric("hecaton_donor_serving", "1 while the donor serves requests", Gauge, |donor| {
        f64::from(u8::from(donor.state == DonorState::Serving))
    }),
    Metric("hecaton_donor_restarts", "Times that the donor was started again", Counter, |donor| {
        donor.restarts as f64
    }),
];

const CONSUMER: &[Metric<ConsumerReport>] = &[
    Metric("hecaton_pager_restarts", "Times that the node started it again", Counter, |consumer| {
        consumer.restarts as f64
    }),
    Metric("hecaton_pager_held_descriptors", "Kept by the node for the pager", Gauge, |consumer| {
        consumer.held_fds as f64
    }),
];

const PAGER: &[Metric<Stats>] = &[
    Metric("hecaton_pager_local_limit_bytes", "Memory that may be local", Gauge, |stats| {
        stats.local_limit_bytes as f64
    }),
    Metric("hecaton_pager_local_bytes", "Memory that is local", Gauge, |stats| {
        stats.local_bytes as f64
    }),
    Metric("hecaton_pager_local_peak_bytes", "Most memory that ever was local", Gauge, |stats| {
        stats.local_peak_bytes as f64
    }),
    Metric("hecaton_pager_pool_bytes", "Memory that the pool holds", Gauge, |stats| {
        stats.pool_bytes as f64
    }),
    Metric("hecaton_pager_pool_peak_bytes", "Most that the pool ever held", Gauge, |stats| {
        stats.pool_peak_bytes as f64
    }),
    Metric("hecaton_pager_processes", "Processes attached", Gauge, |stats| stats.processes as f64),
    Metric("hecaton_pager_faults", "Faults on missing pages", Counter, |stats| stats.faults as f64),
    Metric("hecaton_pager_zero_faults", "Faults on pages never written", Counter, |stats| {
        stats.zero_faults as f64
    }),
    Metric("hecaton_pager_staging_faults", "Faults on pages on their way out", Counter, |stats| {
        stats.staging_faults as f64
    }),
    Metric("hecaton_pager_pool_faults", "Faults served by a donor", Counter, |stats| {
        stats.pool_faults as f64
    }),
    Metric("hecaton_pager_late_faults", "Faults on pages on their way in", Counter, |stats| {
        stats.late_faults as f64
    }),
    Metric("hecaton_pager_starved_faults", "Faults that waited for room", Counter, |stats| {
        stats.starved_faults as f64
    }),
    Metric("hecaton_pager_write_protect_faults", "Writes to clean pages", Counter, |stats| {
        stats.write_protect_faults as f64
    }),
    Metric("hecaton_pager_pages_zero_filled", "Pages of zeros mapped", Counter, |stats| {
        stats.pages_zero_filled as f64
    }),
    Metric("hecaton_pager_pages_in", "Pages fetched from donors", Counter, |stats| {
        stats.pages_in as f64
    }),
    Metric("hecaton_pager_pages_out", "Pages written to donors", Counter, |stats| {
        stats.pages_out as f64
    }),
    Metric("hecaton_pager_pages_evicted", "Pages evicted", Counter, |stats| {
        stats.pages_evicted as f64
    }),
    Metric("hecaton_pager_pages_dropped_clean", "Evicted without writing", Counter, |stats| {
        stats.pages_dropped_clean as f64
    }),
    Metric("hecaton_pager_pages_dropped_zero", "Evicted, all zero", Counter, |stats| {
        stats.pages_dropped_zero as f64
    }),
    Metric("hecaton_pager_pages_discarded", "Given up by a virtual machine", Counter, |stats| {
        stats.pages_discarded as f64
    }),
    Metric("hecaton_pager_guest_ram_bytes", "Memory of a virtual machine", Gauge, |stats| {
        stats.guest_ram_bytes as f64
    }),
    Metric("hecaton_pager_memory_file_bytes", "Of that, held by this host", Gauge, |stats| {
        stats.memory_file_bytes as f64
    }),
    Metric("hecaton_pager_handovers_refused", "Refused hand-overs of memory", Counter, |stats| {
        stats.handovers_refused as f64
    }),
    Metric("hecaton_pager_pages_prefetched", "Fetched ahead of a fault", Counter, |stats| {
        stats.pages_prefetched as f64
    }),
    Metric("hecaton_pager_prefetch_hits", "Prefetched and used", Counter, |stats| {
        stats.prefetch_hits as f64
    }),
    Metric("hecaton_pager_prefetch_waste", "Prefetched in vain", Counter, |stats| {
        stats.prefetch_waste as f64
    }),
    Metric("hecaton_pager_checksum_errors", "Pages that came damaged", Counter, |stats| {
        stats.checksum_errors as f64
    }),
    Metric("hecaton_pager_scrub_rounds", "Times that all copies were compared", Counter, |stats| {
        stats.pool.scrub.rounds as f64
    }),
    Metric("hecaton_pager_scrub_bytes", "Read by donors to compare copies", Counter, |stats| {
        stats.pool.scrub.verified_bytes as f64
    }),
    Metric("hecaton_pager_scrub_repaired_pages", "Mended from another copy", Counter, |stats| {
        stats.pool.scrub.repaired_pages as f64
    }),
    Metric("hecaton_pager_scrub_given_up_copies", "Not what was stored", Counter, |stats| {
        stats.pool.scrub.copies_given_up as f64
    }),
    Metric("hecaton_pager_scrub_lost_pages", "Right in no copy", Gauge, |stats| {
        stats.pool.scrub.lost_pages as f64
    }),
    Metric("hecaton_pager_takeovers", "Successors of a pager that had died", Counter, |stats| {
        stats.restarts as f64
    }),
];

/// A quantile of a latency, in microseconds: its label, and how it is read.
type Quantile = (&'static str, fn(&Latency) -> f64);

const QUANTILES: [Quantile; 4] = [
    ("0.5", |latency| latency.p50_us),
    ("0.9", |latency| latency.p90_us),
    ("0.99", |latency| latency.p99_us),
    ("1", |latency| latency.max_us),
];

type Labels<'a> = Vec<(&'static str, &'a str)>;

#[derive(Debug)]
struct Nodes(Vec<NodeReport>);

impl Collector for Nodes {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let nodes: Vec<_> =
            self.0.iter().map(|node| (vec![("node", node.name.as_str())], node)).collect();
        let donors: Vec<_> = self.each(|node| &node.donors, |donor| ("donor", &donor.name));
        let consumers: Vec<_> =
            self.each(|node| &node.consumers, |consumer| ("consumer", &consumer.name));
        let pagers: Vec<_> = consumers
            .iter()
            .filter_map(|(labels, consumer)| Some((labels.clone(), consumer.stats.as_ref()?)))
            .collect();
        encode_all(&mut encoder, NODE, &nodes)?;
        encode_all(&mut encoder, DONOR, &donors)?;
        encode_all(&mut encoder, CONSUMER, &consumers)?;
        encode_all(&mut encoder, PAGER, &pagers)?;
        encode_latencies(&mut encoder, &pagers)
    }
}

impl Nodes {
    /// The parts of all nodes, with their labels.
    fn each<'a, T>(
        &'a self,
        parts: impl Fn(&'a NodeReport) -> &'a Vec<T>,
        label: impl Fn(&'a T) -> (&'static str, &'a String),
    ) -> Vec<(Labels<'a>, &'a T)> {
        let mut all = Vec::new();
        for node in &self.0 {
            for part in parts(node) {
                let (key, value) = label(part);
                all.push((vec![("node", node.name.as_str()), (key, value.as_str())], part));
            }
        }
        all
    }
}

fn encode_all<T>(
    encoder: &mut DescriptorEncoder<'_>,
    metrics: &[Metric<T>],
    parts: &[(Labels<'_>, &T)],
) -> fmt::Result {
    for Metric(name, help, kind, read) in metrics {
        let metric_type = match kind {
            Counter => MetricType::Counter,
            Gauge => MetricType::Gauge,
        };
        let mut family = encoder.encode_descriptor(name, help, None, metric_type)?;
        for (labels, part) in parts {
            let mut metric = family.encode_family(labels)?;
            match kind {
                Counter => metric.encode_counter::<NoLabelSet, _, f64>(&read(part), None)?,
                Gauge => metric.encode_gauge(&read(part))?,
            }
        }
    }
    Ok(())
}

fn encode_latencies(
    encoder: &mut DescriptorEncoder<'_>,
    pagers: &[(Labels<'_>, &Stats)],
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(
        "hecaton_pager_fault_latency_seconds",
        "From reading a fault to the page's arrival",
        None,
        MetricType::Gauge,
    )?;
    for (labels, stats) in pagers {
        let served = [("pool", &stats.pool_fault_latency), ("local", &stats.local_fault_latency)];
        for (by, latency) in served {
            if latency.count == 0 {
                continue;
            }
            for (quantile, read) in QUANTILES {
                let mut labels = labels.clone();
                labels.extend([("served", by), ("quantile", quantile)]);
                family.encode_family(&labels)?.encode_gauge(&(read(latency) / 1e6))?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pagers::PagerState;
    use hecaton_memory::SpaceId;

    fn report() -> NodeReport {
        let stats = Stats {
            faults: 12,
            local_bytes: 4096,
            pool_fault_latency: Latency { count: 3, p50_us: 25.0, ..Default::default() },
            ..Default::default()
        };
        let donor = DonorReport {
            name: "d\"1".to_owned(),
            state: DonorState::Serving,
            restarts: 2,
            ..Default::default()
        };
        let consumer = ConsumerReport {
            name: "sort".to_owned(),
            space: SpaceId(1),
            state: PagerState::Serving,
            pid: None,
            restarts: 0,
            local_bytes: 8192,
            held_fds: 3,
            stats: Some(stats),
        };
        NodeReport {
            name: "a".to_owned(),
            donors: vec![donor],
            consumers: vec![consumer],
            ..Default::default()
        }
    }

    #[test]
    fn names_types_and_labels_are_those_of_openmetrics() {
        let text = render(&[report()]);
        for line in [
            "# TYPE hecaton_donor_restarts counter",
            "hecaton_donor_restarts_total{node=\"a\",donor=\"d\\\"1\"} 2.0",
            "# TYPE hecaton_pager_local_bytes gauge",
            "hecaton_pager_local_bytes{node=\"a\",consumer=\"sort\"} 4096.0",
            "hecaton_pager_faults_total{node=\"a\",consumer=\"sort\"} 12.0",
            "hecaton_node_consumers{node=\"a\"} 1.0",
            "hecaton_pager_fault_latency_seconds{node=\"a\",consumer=\"sort\",served=\"pool\",\
             quantile=\"0.5\"} 0.000025",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("served=\"local\""), "there was no local fault");
        assert_eq!(text.matches(END).count(), 1);
        assert!(text.ends_with(END));
    }

    #[test]
    fn every_metric_has_a_name_of_its_own() {
        let text = render(&[report(), NodeReport { name: "b".to_owned(), ..report() }]);
        let mut types: Vec<_> = text.lines().filter(|line| line.starts_with("# TYPE")).collect();
        let count = types.len();
        types.sort_unstable();
        types.dedup();
        assert_eq!(types.len(), count);
    }
}
