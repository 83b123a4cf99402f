//! Measures the cost of a machine's paging.
//! The cost is processor time of the machine's pager and of the donors, and bytes over the wire.

use crate::bench::world::cluster::Cluster;
use anyhow::Context as _;
use hecaton_memory::PAGE_SIZE;
use serde::{Serialize, Serializer, ser::SerializeStruct as _};
use std::{
    fmt, fs,
    ops::Add,
    time::{Duration, Instant},
};

/// Ticks a second in `/proc/PID/stat`; Linux shows the same number on every machine.
const TICKS_PER_SECOND: f64 = 100.0;

/// A pager reports its counters to its node once a second.
const STATS_ARE_KNOWN_AFTER: Duration = Duration::from_millis(1300);

/// Totals since everything was started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Totals {
    at: Instant,
    pager_s: f64,
    donors_s: f64,
    pages_in: u64,
    pages_out: u64,
    faults: u64,
}

/// Usage between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Usage {
    pub(super) seconds: f64,
    pub(super) bytes_in: u64,
    pub(super) bytes_out: u64,
    /// Faults that the pager was asked to answer.
    pub(super) faults: u64,
    /// Processor seconds of the pager, and of all donors.
    pub(super) pager_s: f64,
    pub(super) donors_s: f64,
}

impl Usage {
    /// Processor seconds of the pager and of the donors for each GB (10⁹ bytes) moved, in or out.
    fn per_gigabyte(&self) -> Option<(f64, f64)> {
        let gigabytes = (self.bytes_in + self.bytes_out) as f64 / 1e9;
        (gigabytes > 0.0).then(|| (self.pager_s / gigabytes, self.donors_s / gigabytes))
    }
}

impl Serialize for Usage {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let costs = self.per_gigabyte();
        let mut fields = serializer.serialize_struct("Usage", 8)?;
        fields.serialize_field("seconds", &self.seconds)?;
        fields.serialize_field("bytes_in", &self.bytes_in)?;
        fields.serialize_field("bytes_out", &self.bytes_out)?;
        fields.serialize_field("faults", &self.faults)?;
        fields.serialize_field("pager_cpu_s", &self.pager_s)?;
        fields.serialize_field("donors_cpu_s", &self.donors_s)?;
        fields.serialize_field("pager_cpu_s_per_gb", &costs.map(|(pager, _)| pager))?;
        fields.serialize_field("donors_cpu_s_per_gb", &costs.map(|(_, donors)| donors))?;
        fields.end()
    }
}

impl Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            bytes_in: self.bytes_in + other.bytes_in,
            bytes_out: self.bytes_out + other.bytes_out,
            faults: self.faults + other.faults,
            pager_s: self.pager_s + other.pager_s,
            donors_s: self.donors_s + other.donors_s,
        }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        write!(f, "moved {:.2} GB in and {:.2} GB out", gb(self.bytes_in), gb(self.bytes_out))?;
        let Some((pager, donors)) = self.per_gigabyte() else { return Ok(()) };
        write!(f, "; processor seconds a GB: {pager:.2} of the pager, {donors:.2} of the donors")
    }
}

impl Totals {
    /// Totals as of now. Waits until the node knows the pager's counters.
    pub(super) fn now(cluster: &Cluster, machine: &str) -> anyhow::Result<Self> {
        std::thread::sleep(STATS_ARE_KNOWN_AFTER);
        let report = cluster.node()?.status()?;
        let consumer = report.consumers.iter().find(|consumer| consumer.name == machine);
        let consumer = consumer.with_context(|| format!("`{machine}` has no pager"))?;
        let stats = consumer.stats.as_ref();
        let stats = stats.with_context(|| format!("the pager of `{machine}` has told nothing"))?;
        let pager = consumer.pid.with_context(|| format!("`{machine}` has no pager"))?;
        let donors = report.donors.iter().filter_map(|donor| donor.pid);
        Ok(Self {
            at: Instant::now(),
            pager_s: processor_seconds(pager),
            donors_s: donors.map(processor_seconds).sum(),
            pages_in: stats.pages_in,
            pages_out: stats.pages_out,
            faults: stats.faults,
        })
    }

    pub(super) fn since(&self, before: &Self) -> Usage {
        let bytes = |pages: u64, before: u64| pages.saturating_sub(before) * PAGE_SIZE as u64;
        Usage {
            seconds: self.at.saturating_duration_since(before.at).as_secs_f64(),
            bytes_in: bytes(self.pages_in, before.pages_in),
            bytes_out: bytes(self.pages_out, before.pages_out),
            faults: self.faults.saturating_sub(before.faults),
            pager_s: self.pager_s - before.pager_s,
            donors_s: self.donors_s - before.donors_s,
        }
    }
}

/// Processor seconds of a process, ended threads included; 0 if the process no longer exists.
fn processor_seconds(pid: u32) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    ticks(&stat).unwrap_or(0) as f64 / TICKS_PER_SECOND
}

/// The sum of `utime` and `stime`. The name in brackets before them may contain any character.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Bytes that a hypervisor takes for itself: its resident memory without the largest mapping,
/// which is the guest's RAM.
pub(super) fn own_bytes(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/smaps");
    let smaps = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(all_but_largest(&smaps))
}

fn all_but_largest(smaps: &str) -> u64 {
    let field = |line: &str, name: &str| {
        let value = line.strip_prefix(name)?.trim().strip_suffix(" kB")?;
        value.trim().parse::<u64>().ok().map(|kib| kib << 10)
    };
    let (mut total, mut largest, mut size) = (0, (0, 0), 0);
    for line in smaps.lines() {
        if let Some(bytes) = field(line, "Size:") {
            size = bytes;
        } else if let Some(resident) = field(line, "Rss:") {
            total += resident;
            largest = largest.max((size, resident));
        }
    }
    total - largest.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_the_difference() {
        let at = Instant::now();
        let before =
            Totals { at, pager_s: 1.0, donors_s: 2.0, pages_in: 10, pages_out: 0, faults: 3 };
        let after = Totals {
            at: at + Duration::from_secs(4),
            pager_s: 2.0,
            donors_s: 2.5,
            pages_in: 250_010,
            pages_out: 250_000,
            faults: 5,
        };
        let usage = after.since(&before);
        let bytes = 250_000 * PAGE_SIZE as u64;
        assert_eq!((usage.bytes_in, usage.bytes_out, usage.faults), (bytes, bytes, 2));
        let gigabytes = 2.0 * bytes as f64 / 1e9;
        assert_eq!(usage.per_gigabyte(), Some((1.0 / gigabytes, 0.5 / gigabytes)));
        assert_eq!((usage + usage).per_gigabyte(), usage.per_gigabyte());
        assert_eq!(before.since(&before).per_gigabyte(), None);
    }

    #[test]
    fn a_name_with_brackets_is_passed_over() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 100 0 0 0 250 30 0 0 20 0 1 0 100";
        assert_eq!(ticks(stat), Some(280));
        assert_eq!(ticks(""), None);
        assert!(processor_seconds(std::process::id()) >= 0.0);
    }

    #[test]
    fn the_largest_mapping_is_the_guests() {
        let smaps = "55-66 rw-p 0 00:00 0\nSize:  100 kB\nRss:  40 kB\nPss: 4 kB\n\
                     77-88 rw-p 0 00:00 0\nSize:  4096 kB\nRss:  1024 kB\n\
                     99-aa rw-p 0 00:00 0\nSize:  8 kB\nRss:  8 kB\n";
        assert_eq!(all_but_largest(smaps), 48 << 10);
        assert!(own_bytes(std::process::id()).unwrap() > 0);
    }
}
