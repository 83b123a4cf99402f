//! Node reports as metrics for Prometheus, in the OpenMetrics text format.
//!
//! The reports are the only source: a manager shows all nodes as a node shows itself and all
//! processes that it runs ([`crate::children::processes`]). Latencies are gauges with a `quantile`
//! label, because a pager reports quantiles of its whole life and not buckets.

use crate::children::processes::ProcessReport;
use crate::cluster::report::{NodeReport, PoolShare};
use crate::donors::{DonorReport, DonorState};
use crate::pagers::ConsumerReport;
use crate::volumes::{VolumeReport, VolumeState};
use hecaton_block::Stats as VolumeStats;
use hecaton_donor::prometheus_text;
use hecaton_memory::pages_to_bytes;
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
        node.consumer_count() as f64
    }),
];

const PROCESS: &[Metric<ProcessReport>] = &[
    Metric(
        "hecaton_process_resident_bytes",
        "Resident, shared memory included",
        Gauge,
        |process| process.takes.resident_bytes as f64,
    ),
    Metric("hecaton_process_cpu_seconds", "Time that its threads have run", Counter, |process| {
        process.takes.cpu_ms as f64 / 1000.0
    }),
    Metric("hecaton_process_threads", "Its threads", Gauge, |process| process.takes.threads as f64),
];

/// Metrics of nodes that have a quota.
const QUOTA: &[Metric<PoolShare>] = &[
    Metric("hecaton_node_quota_bytes", "Of the pool, what it may use", Gauge, |share| {
        pages_to_bytes(share.quota_pages.unwrap_or_default()) as f64
    }),
    Metric("hecaton_node_quota_used_bytes", "Of the pool, what it uses", Gauge, |share| {
        pages_to_bytes(share.used_pages) as f64
    }),
];

/// Metrics of consumers that have a target.
const TARGET: &[Metric<u64>] =
    &[Metric("hecaton_pager_target_bytes", "Of the pool, what it may hold", Gauge, |bytes| {
        *bytes as f64
    })];

const DONOR: &[Metric<DonorReport>] = &[
    Metric("hecaton_donor_serving", "1 while the donor serves requests", Gauge, |donor| {
        f64::from(u8::from(donor.state == DonorState::Serving))
    }),
    Metric("hecaton_donor_restarts", "Times that the donor was started again", Counter, |donor| {
        donor.restarts as f64
    }),
    Metric(
        "hecaton_donor_ownerless_bytes",
        "Lent to who has been silent for half a lease",
        Gauge,
        |donor| {
            let spaces = donor.stats.iter().flat_map(|stats| &stats.spaces);
            let ownerless = spaces.filter(|space| space.silent_ms > space.lease_ms / 2);
            pages_to_bytes(ownerless.map(|space| space.pages).sum()) as f64
        },
    ),
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
    Metric("hecaton_pager_puts", "Pages put into the pool", Counter, |stats| {
        stats.puts_total as f64
    }),
    Metric("hecaton_pager_puts_within_target", "Of those, within the target", Counter, |stats| {
        stats.puts_succeeded as f64
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
    Metric("hecaton_pager_degraded_bytes", "In extents that lack a copy", Gauge, |stats| {
        stats.pool.degraded_bytes as f64
    }),
    Metric("hecaton_pager_lost_bytes", "In extents whose last copy is gone", Gauge, |stats| {
        stats.pool.lost_bytes as f64
    }),
    Metric("hecaton_pager_filled_bytes", "Copied to make copies or move", Counter, |stats| {
        stats.pool.copied_bytes as f64
    }),
    Metric("hecaton_pager_coded_bytes", "Cold memory in an erasure code", Gauge, |stats| {
        stats.pool.coded_bytes as f64
    }),
    Metric("hecaton_pager_saved_bytes", "Extents that the code saves", Gauge, |stats| {
        stats.pool.saved_bytes as f64
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

const VOLUME: &[Metric<VolumeReport>] = &[
    Metric("hecaton_volume_serving", "1 while the volume is served", Gauge, |volume| {
        f64::from(u8::from(volume.state == VolumeState::Serving))
    }),
    Metric("hecaton_volume_size_bytes", "Size of the volume", Gauge, |volume| {
        volume.size_bytes as f64
    }),
    Metric("hecaton_volume_restarts", "Times that its process was started again", Counter, |v| {
        v.restarts as f64
    }),
];

const VOLUME_STATS: &[Metric<VolumeStats>] = &[
    Metric("hecaton_volume_data_bytes", "Of its size, what holds data", Gauge, |stats| {
        stats.data_bytes as f64
    }),
    Metric("hecaton_volume_pool_bytes", "Of its data, what is in the pool", Gauge, |stats| {
        stats.pool_bytes() as f64
    }),
    Metric("hecaton_volume_spilled_bytes", "Data in the spill file", Gauge, |stats| {
        stats.spilled_bytes as f64
    }),
    Metric("hecaton_volume_taken_back_bytes", "Taken back by the policy", Counter, |stats| {
        stats.taken_back_bytes as f64
    }),
    Metric("hecaton_volume_puts", "Pages that were to be in the pool", Counter, |stats| {
        stats.puts_total as f64
    }),
    Metric("hecaton_volume_puts_within_target", "Of those, in the pool", Counter, |stats| {
        stats.puts_succeeded as f64
    }),
    Metric("hecaton_volume_gets", "Pages read from the pool", Counter, |stats| stats.gets as f64),
    Metric("hecaton_volume_buffered_bytes", "Written data in the write buffer", Gauge, |stats| {
        stats.buffered_bytes as f64
    }),
    Metric(
        "hecaton_volume_unkept_bytes",
        "Of its size, what could not be written",
        Gauge,
        |stats| stats.unkept_bytes as f64,
    ),
    Metric("hecaton_volume_degraded_bytes", "In extents that lack a copy", Gauge, |stats| {
        pages_to_bytes(stats.pool.segments_degraded * stats.pool.segment_pages) as f64
    }),
    Metric("hecaton_volume_lost_bytes", "In extents whose last copy is gone", Gauge, |stats| {
        pages_to_bytes(stats.pool.segments_lost * stats.pool.segment_pages) as f64
    }),
    Metric("hecaton_volume_filled_bytes", "Copied to make copies or move", Counter, |stats| {
        stats.pool.bytes_filled as f64
    }),
    Metric(
        "hecaton_volume_scrub_rounds",
        "Times that all copies were compared",
        Counter,
        |stats| stats.pool.scrub.rounds as f64,
    ),
    Metric("hecaton_volume_scrub_bytes", "Read by donors to compare copies", Counter, |stats| {
        stats.pool.scrub.bytes_verified as f64
    }),
    Metric("hecaton_volume_scrub_repaired_pages", "Mended from another copy", Counter, |stats| {
        stats.pool.scrub.pages_repaired as f64
    }),
    Metric("hecaton_volume_scrub_given_up_copies", "Not what was stored", Counter, |stats| {
        stats.pool.scrub.copies_given_up as f64
    }),
    Metric("hecaton_volume_scrub_lost_pages", "Right in no copy", Gauge, |stats| {
        stats.pool.scrub.pages_lost as f64
    }),
    Metric("hecaton_volume_clients", "Clients connected", Gauge, |stats| stats.clients as f64),
    Metric("hecaton_volume_reads", "Reads served", Counter, |stats| stats.reads as f64),
    Metric("hecaton_volume_read_bytes", "Bytes read", Counter, |stats| stats.read_bytes as f64),
    Metric("hecaton_volume_writes", "Writes served", Counter, |stats| stats.writes as f64),
    Metric("hecaton_volume_written_bytes", "Bytes written", Counter, |stats| {
        stats.written_bytes as f64
    }),
    Metric("hecaton_volume_dropped_bytes", "Bytes trimmed", Counter, |stats| {
        stats.dropped_bytes as f64
    }),
    Metric("hecaton_volume_errors", "Requests that failed", Counter, |stats| stats.errors as f64),
    Metric(
        "hecaton_volume_unsettled",
        "Writes that wait for donors that are away",
        Gauge,
        |stats| stats.unsettled as f64,
    ),
];

/// Metrics of volumes that have a target.
const VOLUME_TARGET: &[Metric<u64>] =
    &[Metric("hecaton_volume_target_bytes", "Of the pool, what it may hold", Gauge, |bytes| {
        *bytes as f64
    })];

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
        let processes = self.0.iter().flat_map(|node| {
            node.processes.iter().map(|process| {
                let (role, name) = (process.role.name(), process.name.as_str());
                (vec![("node", node.name.as_str()), ("role", role), ("name", name)], process)
            })
        });
        encode_all(&mut encoder, PROCESS, &processes.collect::<Vec<_>>())?;
        let with_quota = nodes.iter().filter(|(_, node)| node.pool.quota_pages.is_some());
        let quotas: Vec<_> =
            with_quota.map(|(labels, node)| (labels.clone(), &node.pool)).collect();
        encode_all(&mut encoder, QUOTA, &quotas)?;
        encode_all(&mut encoder, DONOR, &donors)?;
        encode_all(&mut encoder, CONSUMER, &consumers)?;
        encode_all(&mut encoder, PAGER, &pagers)?;
        let targets: Vec<_> = pagers
            .iter()
            .filter_map(|(labels, stats)| Some((labels.clone(), stats.target_bytes.as_ref()?)))
            .collect();
        encode_all(&mut encoder, TARGET, &targets)?;
        let volumes: Vec<_> = self.each(|node| &node.volumes, |volume| ("volume", &volume.name));
        let served: Vec<_> = volumes
            .iter()
            .filter_map(|(labels, volume)| Some((labels.clone(), volume.stats.as_ref()?)))
            .collect();
        encode_all(&mut encoder, VOLUME, &volumes)?;
        encode_all(&mut encoder, VOLUME_STATS, &served)?;
        let targets: Vec<_> = served
            .iter()
            .filter_map(|(labels, stats)| Some((labels.clone(), stats.target_bytes.as_ref()?)))
            .collect();
        encode_all(&mut encoder, VOLUME_TARGET, &targets)?;
        encode_host_memory(&mut encoder, &self.0)?;
        encode_host_cores(&mut encoder, &self.0)?;
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

/// Encodes every byte of the hosts whose nodes have an agent.
fn encode_host_memory(encoder: &mut DescriptorEncoder<'_>, nodes: &[NodeReport]) -> fmt::Result {
    let mut family = encoder.encode_descriptor(
        "hecaton_host_memory_bytes",
        "Memory of the host, by NUMA node and by who has it",
        None,
        MetricType::Gauge,
    )?;
    for node in nodes {
        for memory in node.agent.iter().flat_map(|agent| &agent.nodes) {
            let numa_node = memory.node.to_string();
            for (class, bytes) in memory.classes() {
                let name = node.name.as_str();
                let labels = vec![("node", name), ("numa_node", &numa_node), ("class", class)];
                family.encode_family(&labels)?.encode_gauge(&(bytes as f64))?;
            }
        }
    }
    Ok(())
}

/// Encodes every core of the hosts whose nodes have an agent, and the cores of each machine.
fn encode_host_cores(encoder: &mut DescriptorEncoder<'_>, nodes: &[NodeReport]) -> fmt::Result {
    let agents = nodes.iter().filter_map(|node| Some((node.name.as_str(), node.agent.as_ref()?)));
    let agents: Vec<_> = agents.collect();
    let mut family = encoder.encode_descriptor(
        "hecaton_host_cores",
        "Cores of the host, by who has them",
        None,
        MetricType::Gauge,
    )?;
    for (name, agent) in &agents {
        for (class, number) in agent.cores.classes() {
            let labels = vec![("node", *name), ("class", class)];
            family.encode_family(&labels)?.encode_gauge(&(number as f64))?;
        }
    }
    let mut family = encoder.encode_descriptor(
        "hecaton_host_machine_cores",
        "Cores that a machine has as long as it exists",
        None,
        MetricType::Gauge,
    )?;
    for (name, agent) in &agents {
        for machine in agent.machines.iter().filter(|machine| machine.cores > 0) {
            let labels = vec![("node", *name), ("machine", machine.name.as_str())];
            family.encode_family(&labels)?.encode_gauge(&f64::from(machine.cores))?;
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
    use crate::agent::{AgentReport, CoreReport, MachineReport, MachineState, NodeMemoryReport};
    use crate::children::processes::{ProcessUse, Role};
    use crate::pagers::PagerState;
    use hecaton_broker::{CoreLedger, NewcomerKind, NodeLedger};
    use hecaton_donor::{Snapshot, SpaceSnapshot};
    use hecaton_memory::{Epoch, SpaceId};

    fn report() -> NodeReport {
        let stats = Stats {
            faults: 12,
            local_bytes: 4096,
            target_bytes: Some(8192),
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
            local_bytes: 8192,
            held_fds: 3,
            stats: Some(stats),
            ..ConsumerReport::default()
        };
        NodeReport {
            name: "a".to_owned(),
            donors: vec![donor],
            consumers: vec![consumer],
            volumes: vec![VolumeReport { name: "disk".to_owned(), ..Default::default() }],
            processes: vec![ProcessReport {
                role: Role::Pager,
                name: "sort".to_owned(),
                takes: ProcessUse { resident_bytes: 4096, cpu_ms: 1500, threads: 3 },
            }],
            agent: Some(AgentReport {
                qmp_dir: "/run/vms".into(),
                buffer_bytes: 0,
                nodes: vec![NodeMemoryReport {
                    node: 1,
                    host_bytes: 8192,
                    unmanaged_bytes: 0,
                    ledger: NodeLedger {
                        total_bytes: 8192,
                        harvested_bytes: 8192,
                        ..Default::default()
                    },
                }],
                cores: CoreReport {
                    host: 4,
                    ledger: CoreLedger { total: 4, regular: 3, ..Default::default() },
                    ..Default::default()
                },
                machines: vec![MachineReport {
                    name: "vm".to_owned(),
                    kind: NewcomerKind::Regular,
                    state: MachineState::Running,
                    pid: 7,
                    base_bytes: 0,
                    max_bytes: 0,
                    requested_bytes: 0,
                    harvested_bytes: 0,
                    held_bytes: 0,
                    cores: 3,
                    cgroup: None,
                    cores_failure: None,
                    waited_ms: None,
                    guest_listens: None,
                    nodes: Vec::new(),
                }],
                ..Default::default()
            }),
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
            "hecaton_volume_restarts_total{node=\"a\",volume=\"disk\"} 0.0",
            "hecaton_host_memory_bytes{node=\"a\",numa_node=\"1\",class=\"harvested\"} 8192.0",
            "hecaton_host_cores{node=\"a\",class=\"regular\"} 3.0",
            "hecaton_host_machine_cores{node=\"a\",machine=\"vm\"} 3.0",
            "hecaton_node_consumers{node=\"a\"} 1.0",
            "# TYPE hecaton_process_cpu_seconds counter",
            "hecaton_process_cpu_seconds_total{node=\"a\",role=\"pager\",name=\"sort\"} 1.5",
            "hecaton_process_resident_bytes{node=\"a\",role=\"pager\",name=\"sort\"} 4096.0",
            "hecaton_pager_target_bytes{node=\"a\",consumer=\"sort\"} 8192.0",
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
    fn what_a_failed_node_leaves_is_counted_at_its_donors_and_at_its_borrowers() {
        let mut report = report();
        let space = |pages: u64, silent_ms| SpaceSnapshot {
            space: SpaceId(pages),
            consumer: "c".to_owned(),
            fence: Epoch(1),
            extents: 1,
            pages,
            recalled: 0,
            silent_ms,
            lease_ms: 30_000,
        };
        let spaces = vec![space(1, 15_000), space(2, 15_001), space(4, 29_000)];
        report.donors[0].stats = Some(Snapshot { spaces, ..Default::default() });
        let pool = &mut report.consumers[0].stats.as_mut().expect("it has some").pool;
        (pool.degraded_bytes, pool.lost_bytes, pool.copied_bytes) = (10, 20, 30);
        let text = render(&[report]);
        for line in [
            "hecaton_donor_ownerless_bytes{node=\"a\",donor=\"d\\\"1\"} 24576.0",
            "hecaton_pager_degraded_bytes{node=\"a\",consumer=\"sort\"} 10.0",
            "hecaton_pager_lost_bytes{node=\"a\",consumer=\"sort\"} 20.0",
            "hecaton_pager_filled_bytes_total{node=\"a\",consumer=\"sort\"} 30.0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
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
