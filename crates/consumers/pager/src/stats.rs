//! Defines a pager's statistics, and formats some of them for people.

use crate::pool::placement::PoolUse;
use hdrhistogram::Histogram;
use hecaton_memory::Size;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Counters and latencies since the pager was first started, and its state at this moment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Stats {
    /// When these figures were taken: milliseconds of Unix time. Figures of a consumer that are
    /// shown elsewhere are up to two reports old.
    #[serde(default)]
    pub taken_at_ms: u64,
    /// Bytes that may be local.
    pub local_limit_bytes: u64,
    /// Bytes that are in the consumer's memory, of all its processes.
    pub local_bytes: u64,
    /// The most that `local_bytes` ever was.
    pub local_peak_bytes: u64,
    /// Bytes that the pool holds (or will, once they are written out).
    pub pool_bytes: u64,
    /// The most that `pool_bytes` ever was.
    pub pool_peak_bytes: u64,
    /// Bytes of the pool that the consumer may hold by the cluster's policy; `None` if nothing
    /// limits it.
    #[serde(default)]
    pub target_bytes: Option<u64>,
    /// Pages put into the pool.
    #[serde(default)]
    pub puts_total: u64,
    /// Part of `puts_total`: placed within the target. The others have a place, too, beyond it.
    #[serde(default)]
    pub puts_succeeded: u64,
    /// Processes attached at this moment.
    pub processes: u64,
    /// Faults on missing pages.
    pub faults: u64,
    /// Part of `faults`: on pages never written, filled with zeros.
    pub zero_faults: u64,
    /// Part of `faults`: on pages still in staging memory.
    pub staging_faults: u64,
    /// Part of `faults`: on pages fetched from a donor for it.
    pub pool_faults: u64,
    /// Part of `faults`: on pages whose fetch was already in flight.
    pub late_faults: u64,
    /// Faults that had to wait for an eviction to make room.
    pub starved_faults: u64,
    /// Write faults on clean pages.
    pub write_protect_faults: u64,
    /// Pages of zeros mapped, at a fault or ahead of one.
    pub pages_zero_filled: u64,
    /// Pages fetched from donors.
    pub pages_in: u64,
    /// Pages written to donors.
    pub pages_out: u64,
    /// Pages evicted; those clean or zero were not written.
    pub pages_evicted: u64,
    /// Part of `pages_evicted`: clean, dropped without writing.
    pub pages_dropped_clean: u64,
    /// Part of `pages_evicted`: all zero, dropped without writing.
    pub pages_dropped_zero: u64,
    /// Times that a page could not be evicted, because it is pinned (O_DIRECT, registered buffers)
    /// or locked (`mlock`). It stays in the program's memory.
    #[serde(default)]
    pub evictions_refused: u64,
    /// Pages fetched ahead of a fault.
    pub pages_prefetched: u64,
    /// Part of `pages_prefetched`: known to have been used.
    pub prefetch_hits: u64,
    /// Part of `pages_prefetched`: found not to be used.
    pub prefetch_waste: u64,
    /// Bytes of guest RAM that were handed over, if the consumer is a virtual machine.
    #[serde(default)]
    pub guest_ram_bytes: u64,
    /// Bytes that the machine's memory files take on this host.
    #[serde(default)]
    pub memory_file_bytes: u64,
    /// No page of the VM's memory can be evicted: local memory grows with use, and the limit is not
    /// kept.
    #[serde(default)]
    pub limit_is_advisory: bool,
    /// Pages of guest RAM that the VM freed: by its balloon, free page reporting or unplug.
    #[serde(default)]
    pub pages_discarded: u64,
    /// Hand-overs of guest RAM that were refused.
    #[serde(default)]
    pub handovers_refused: u64,
    /// Donors get pages only encrypted.
    #[serde(default)]
    pub encrypted: bool,
    /// Pages that arrived with a wrong checksum or, encrypted, were not what was last written.
    pub checksum_errors: u64,
    /// Faults on pages that the tables have as resident: a program frees and uses a page at once.
    pub unexpected_missing: u64,
    /// Part of `unexpected_missing`: the kernel had reported no free of the page. The program read
    /// zeros there, and its results may be wrong.
    #[serde(default)]
    pub unexplained_missing: u64,
    /// Processes that the programs started, and that are not on the pool.
    #[serde(default)]
    pub outside: Outside,
    /// Times that a successor took over from a pager that had died.
    pub restarts: u64,
    /// Time from reading a fault to the page's arrival, for faults that a donor served.
    pub pool_fault_latency: Latency,
    /// Time from reading a fault to the page's arrival, for faults that this host served.
    pub local_fault_latency: Latency,
    /// How the pool holds the memory.
    #[serde(default)]
    pub pool: PoolUse,
    /// Why the consumer was ended, if it was.
    pub error: Option<String>,
}

impl Stats {
    /// One line for a person. `None` if all pages were where they were known to be.
    pub fn describe_missing(&self) -> Option<String> {
        let count = self.unexplained_missing;
        (count > 0).then(|| {
            format!(
                "{count} pages were missing that the program had not freed, and were read as zeros; \
                 its results may be wrong. Please report this"
            )
        })
    }
}

/// Processes that programs of the consumer started, and that are not on the pool. Processes that
/// live for less than two seconds may be missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outside {
    /// Number since this pager process started.
    pub processes: u64,
    /// Sum of the peaks of each process's resident anonymous memory, in bytes.
    pub peak_bytes: u64,
    /// Names of up to eight of their programs.
    pub names: Vec<String>,
}

impl Outside {
    /// One line for a person. `None` if every process was on the pool.
    pub fn describe(&self) -> Option<String> {
        let (count, were) = match self.processes {
            0 => return None,
            1 => ("1 process".to_owned(), "was"),
            count => (format!("{count} processes"), "were"),
        };
        let most = Size(self.peak_bytes.next_multiple_of(1 << 20));
        let names = self.names.join(", ");
        Some(format!("{count} {were} not on the pool, with {most} of local memory: {names}"))
    }
}

/// A latency distribution, in microseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Latency {
    /// Samples.
    pub count: u64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// Collects one [`Latency`].
pub(crate) struct LatencyRecorder(Histogram<u64>);

impl LatencyRecorder {
    pub(crate) fn new() -> LatencyRecorder {
        // 100 ns to 100 s, two digits: about 20 KiB.
        let histogram = Histogram::new_with_bounds(100, 100_000_000_000, 2);
        LatencyRecorder(histogram.expect("constant bounds"))
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record(latency.as_nanos() as u64);
    }

    pub(crate) fn latency(&self) -> Latency {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1000.0;
        match self.0.len() {
            0 => Latency::default(),
            count => Latency {
                count,
                p50_us: at(0.5),
                p90_us: at(0.9),
                p99_us: at(0.99),
                max_us: self.0.max() as f64 / 1000.0,
            },
        }
    }
}
