//! Snapshots as Prometheus reads them.

use crate::metrics::{BUCKETS_US, ServiceTimes};
use crate::snapshot::{ParkSnapshot, Snapshot};
use hecaton_memory::{PAGE_SIZE, pages_to_bytes};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use std::fmt;

/// The metrics of some donors, in the OpenMetrics text format; each line names its donor.
pub fn prometheus_text(donors: Vec<Snapshot>) -> String {
    let mut registry = Registry::with_prefix("hecaton_donor");
    registry.register_collector(Box::new(Donors(donors)));
    let mut text = String::new();
    // The only error is that of the writer, and a string takes everything.
    let _ = text::encode(&mut text, &registry);
    text
}

#[derive(Debug)]
struct Donors(Vec<Snapshot>);

type Value = fn(&Snapshot) -> u64;

const GAUGES: [(&str, &str, Value); 12] = [
    ("memory_bytes", "Memory that the donor lends at most", |d| pages_to_bytes(d.pages)),
    ("limit_bytes", "Memory that it lends at most at present", |d| pages_to_bytes(d.limit_pages)),
    ("recalled_bytes", "Lent memory above the limit", |d| pages_to_bytes(d.recalled_pages)),
    ("free_bytes", "Memory in no extent", |d| pages_to_bytes(d.free_pages)),
    ("lent_bytes", "Memory in extents, written or not", |d| pages_to_bytes(d.lent_pages)),
    ("committed_bytes", "Memory that the host has really given", |d| d.committed_bytes),
    ("parked_bytes", "Lent memory that is in a file instead", |d| pages_to_bytes(d.parked_pages())),
    ("park_file_bytes", "What that file takes on the disk", |d| of_park(d, |p| p.file_bytes)),
    ("connections", "Open connections", |d| d.counters.connections),
    ("spaces", "Spaces that the donor knows", |d| d.spaces.len() as u64),
    ("in_service", "Requests in service", |d| d.in_service.into()),
    ("draining", "Whether the donor wants all of its memory back", |d| d.draining.into()),
];

const COUNTERS: [(&str, &str, Value); 18] = [
    ("connections_opened", "Connections welcomed", |d| d.counters.connections_total),
    ("pages_read", "Pages sent", |d| d.counters.pages_read),
    ("zero_pages_read", "Pages sent that were never written", |d| d.counters.zero_pages_read),
    ("pages_written", "Pages stored", |d| d.counters.pages_written),
    ("pages_discarded", "Pages in discarded runs", |d| d.counters.pages_discarded),
    ("pages_filled", "Pages copied from other donors", |d| d.counters.pages_filled),
    ("pages_verified", "Pages whose sums were computed anew", |d| d.counters.pages_verified),
    ("pages_damaged", "Of them, not as they were stored", |d| d.counters.pages_damaged),
    ("pages_repaired", "Damaged pages mended from a copy", |d| d.counters.pages_repaired),
    ("pages_parked", "Pages written to the file", |d| of_park(d, |p| p.pages_stored)),
    ("pages_fetched", "Pages brought back from the file", |d| of_park(d, |p| p.pages_fetched)),
    ("parked_pages_read", "Pages sent from the file", |d| of_park(d, |p| p.pages_read)),
    ("parked_pages_unreadable", "Of them, pages that the disk did not give", |d| {
        of_park(d, |p| p.pages_unreadable)
    }),
    ("read_bytes", "Page data sent", |d| d.counters.pages_read * PAGE_SIZE as u64),
    ("written_bytes", "Page data stored", |d| d.counters.pages_written * PAGE_SIZE as u64),
    ("extents_allocated", "Extents lent", |d| d.counters.extents_allocated),
    ("extents_freed", "Extents given back", |d| d.counters.extents_freed),
    ("extents_expired", "Extents whose lease ran out", |d| d.counters.extents_expired),
];

const REFUSALS: [(&str, Value); 8] = [
    ("full", |d| d.counters.refusals.full),
    ("stale_epoch", |d| d.counters.refusals.stale_epoch),
    ("no_such_extent", |d| d.counters.refusals.no_such_extent),
    ("out_of_bounds", |d| d.counters.refusals.out_of_bounds),
    ("corrupt", |d| d.counters.refusals.corrupt),
    ("busy", |d| d.counters.refusals.busy),
    ("no_fill", |d| d.counters.refusals.no_fill),
    ("other_node", |d| d.counters.refusals.other_node),
];

fn of_park(donor: &Snapshot, value: fn(&ParkSnapshot) -> u64) -> u64 {
    donor.park.as_ref().map_or(0, value)
}

impl Collector for Donors {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (name, help, value) in GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for donor in &self.0 {
                let labels = [("donor", donor.name.as_str())];
                family.encode_family(&labels)?.encode_gauge(&value(donor))?;
            }
        }
        for (name, help, value) in COUNTERS {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for donor in &self.0 {
                let labels = [("donor", donor.name.as_str())];
                let mut metric = family.encode_family(&labels)?;
                metric.encode_counter::<[(&str, &str); 0], _, f64>(&value(donor), None)?;
            }
        }
        let help = "Requests and connections refused";
        let mut family = encoder.encode_descriptor("refusals", help, None, MetricType::Counter)?;
        for donor in &self.0 {
            for (reason, value) in REFUSALS {
                let labels = [("donor", donor.name.as_str()), ("reason", reason)];
                let mut metric = family.encode_family(&labels)?;
                metric.encode_counter::<[(&str, &str); 0], _, f64>(&value(donor), None)?;
            }
        }
        let help = "From the whole request to the kernel having taken its answer";
        let kind = MetricType::Histogram;
        let mut family = encoder.encode_descriptor("service_seconds", help, None, kind)?;
        for donor in &self.0 {
            for (request, times) in
                [("read", &donor.counters.read), ("write", &donor.counters.write)]
            {
                let labels = [("donor", donor.name.as_str()), ("request", request)];
                let mut metric = family.encode_family(&labels)?;
                let (sum, buckets) = (times.sum_us / 1e6, buckets(times));
                metric.encode_histogram::<[(&str, &str); 0]>(sum, times.count, &buckets, None)?;
            }
        }
        Ok(())
    }
}

fn buckets(times: &ServiceTimes) -> Vec<(f64, u64)> {
    let bounds = BUCKETS_US.map(|us| us as f64 / 1e6);
    let within: u64 = times.buckets.iter().sum();
    let beyond = (f64::INFINITY, times.count - within);
    bounds.into_iter().zip(times.buckets.iter().copied()).chain([beyond]).collect()
}
