//! Counts a donor's requests and measures its service times.
//!
//! A few shards hold the counters, and each connection counts in one of them. Every request takes
//! the lock of its shard: it is nearly always free, and its memory is in this core's cache.

use hdrhistogram::Histogram;
use hecaton_transport::protocol::{PageState, Refusal};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

const SHARDS: usize = 8;

/// Upper bounds of the buckets in which service times are reported, in microseconds.
pub const BUCKETS_US: [u64; 14] =
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000, 20_000, 100_000, 1_000_000];

/// Counts since this process began to lend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Connections that are open now.
    pub connections: u64,
    /// Connections that were welcomed.
    pub connections_total: u64,
    /// Pages sent.
    pub pages_read: u64,
    /// Pages sent that were never written; a part of `pages_read`.
    pub zero_pages_read: u64,
    /// Pages stored.
    pub pages_written: u64,
    /// Pages in discarded runs.
    pub pages_discarded: u64,
    /// Pages copied from other donors.
    pub pages_filled: u64,
    /// Pages whose checksums were recomputed.
    #[serde(default)]
    pub pages_verified: u64,
    /// Verified pages that did not match their checksums, counted at each verification.
    #[serde(default)]
    pub pages_damaged: u64,
    /// Damaged pages repaired from another donor's copy.
    #[serde(default)]
    pub pages_repaired: u64,
    /// Extents lent.
    pub extents_allocated: u64,
    /// Extents that their borrowers freed.
    pub extents_freed: u64,
    /// Extents reclaimed because their lease expired.
    pub extents_expired: u64,
    /// Requests and connections that were refused.
    pub refusals: Refusals,
    /// Service times of reads, from the whole request to the kernel having taken the answer.
    pub read: ServiceTimes,
    /// Service times of writes.
    pub write: ServiceTimes,
}

/// Refusals by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusals {
    /// No room for an extent.
    pub full: u64,
    /// Requests with an epoch below the fence.
    pub stale_epoch: u64,
    /// Requests for an extent that the space does not hold.
    pub no_such_extent: u64,
    /// Pages beyond an extent's end, or an extent size that is not lent.
    pub out_of_bounds: u64,
    /// Writes of a page that did not match its checksum.
    pub corrupt: u64,
    /// Too many spaces, or too many nodes admitted to a space.
    pub busy: u64,
    /// Fills of an extent that is not being filled, or from a donor that does not answer.
    pub no_fill: u64,
    /// Requests by a node that does not own the space.
    #[serde(default)]
    pub other_node: u64,
}

/// Service times of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServiceTimes {
    /// Number of requests.
    pub count: u64,
    /// Sum, in microseconds.
    pub sum_us: f64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 90th percentile, in microseconds.
    pub p90_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
    /// Maximum, in microseconds.
    pub max_us: f64,
    /// Requests per bucket: above the previous bound, at most this bound; see [`BUCKETS_US`].
    /// Requests above the last bound are in no bucket.
    pub buckets: Vec<u64>,
}

#[derive(Debug)]
pub(crate) struct Metrics {
    shards: [Mutex<Shard>; SHARDS],
    connections: AtomicU64,
    connections_total: AtomicU64,
    expired: AtomicU64,
}

/// The alignment keeps each shard alone on its cache lines.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    counters: Counters,
    read: Histogram<u64>,
    write: Histogram<u64>,
}

/// The shard of one connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ShardId(usize);

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            shards: std::array::from_fn(|_| {
                let counters = Counters::default();
                Mutex::new(Shard { counters, read: times(), write: times() })
            }),
            connections: AtomicU64::new(0),
            connections_total: AtomicU64::new(0),
            expired: AtomicU64::new(0),
        }
    }
}

/// Histogram from 64 ns to 60 s in nanoseconds, exact to 1 %.
fn times() -> Histogram<u64> {
    Histogram::new_with_bounds(64, 60_000_000_000, 2).expect("these bounds are valid")
}

impl Metrics {
    /// Counts a new connection and returns the shard in which it counts.
    pub(crate) fn connected(&self) -> ShardId {
        self.connections.fetch_add(1, Ordering::Relaxed);
        ShardId(self.connections_total.fetch_add(1, Ordering::Relaxed) as usize % SHARDS)
    }

    pub(crate) fn disconnected(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn expired(&self, extents: u64) {
        self.expired.fetch_add(extents, Ordering::Relaxed);
    }

    /// Counts a refused connection, which has no shard of its own.
    pub(crate) fn not_welcomed(&self, refusal: Refusal) {
        self.refused(ShardId(0), refusal);
    }

    pub(crate) fn refused(&self, shard: ShardId, refusal: Refusal) {
        let refusals = &mut self.shard(shard).counters.refusals;
        match refusal {
            Refusal::Full => refusals.full += 1,
            Refusal::StaleEpoch(_) => refusals.stale_epoch += 1,
            Refusal::NoSuchExtent => refusals.no_such_extent += 1,
            Refusal::OutOfBounds => refusals.out_of_bounds += 1,
            Refusal::Corrupt(_) => refusals.corrupt += 1,
            Refusal::NotFilling | Refusal::NoSource => refusals.no_fill += 1,
            Refusal::OtherNode => refusals.other_node += 1,
            // The transport settles the version before it asks the donor.
            Refusal::Busy | Refusal::Version(..) => refusals.busy += 1,
        }
    }

    pub(crate) fn read(&self, shard: ShardId, pages: usize, zero_pages: usize, took: Duration) {
        let mut shard = self.shard(shard);
        shard.counters.pages_read += pages as u64;
        shard.counters.zero_pages_read += zero_pages as u64;
        record(&mut shard.read, took);
    }

    pub(crate) fn written(&self, shard: ShardId, pages: usize, took: Duration) {
        let mut shard = self.shard(shard);
        shard.counters.pages_written += pages as u64;
        record(&mut shard.write, took);
    }

    pub(crate) fn discarded(&self, shard: ShardId, pages: u32) {
        self.shard(shard).counters.pages_discarded += u64::from(pages);
    }

    pub(crate) fn filled(&self, shard: ShardId, pages: u32) {
        self.shard(shard).counters.pages_filled += u64::from(pages);
    }

    pub(crate) fn verified(&self, shard: ShardId, states: &[PageState]) {
        let is_damaged = |state: &&PageState| matches!(state, PageState::Damaged(_));
        let mut shard = self.shard(shard);
        shard.counters.pages_verified += states.len() as u64;
        shard.counters.pages_damaged += states.iter().filter(is_damaged).count() as u64;
    }

    pub(crate) fn repaired(&self, shard: ShardId, pages: u64) {
        self.shard(shard).counters.pages_repaired += pages;
    }

    pub(crate) fn allocated(&self, shard: ShardId) {
        self.shard(shard).counters.extents_allocated += 1;
    }

    pub(crate) fn freed(&self, shard: ShardId, extents: usize) {
        self.shard(shard).counters.extents_freed += extents as u64;
    }

    /// Sums all shards.
    pub(crate) fn total(&self) -> Counters {
        let mut total = Counters {
            connections: self.connections.load(Ordering::Relaxed),
            connections_total: self.connections_total.load(Ordering::Relaxed),
            extents_expired: self.expired.load(Ordering::Relaxed),
            ..Counters::default()
        };
        let (mut read, mut write) = (times(), times());
        for index in 0..SHARDS {
            let shard = self.shard(ShardId(index));
            let counters = &shard.counters;
            total.pages_read += counters.pages_read;
            total.zero_pages_read += counters.zero_pages_read;
            total.pages_written += counters.pages_written;
            total.pages_discarded += counters.pages_discarded;
            total.pages_filled += counters.pages_filled;
            total.pages_verified += counters.pages_verified;
            total.pages_damaged += counters.pages_damaged;
            total.pages_repaired += counters.pages_repaired;
            total.extents_allocated += counters.extents_allocated;
            total.extents_freed += counters.extents_freed;
            total.refusals.full += counters.refusals.full;
            total.refusals.stale_epoch += counters.refusals.stale_epoch;
            total.refusals.no_such_extent += counters.refusals.no_such_extent;
            total.refusals.out_of_bounds += counters.refusals.out_of_bounds;
            total.refusals.corrupt += counters.refusals.corrupt;
            total.refusals.busy += counters.refusals.busy;
            total.refusals.no_fill += counters.refusals.no_fill;
            total.refusals.other_node += counters.refusals.other_node;
            read += &shard.read;
            write += &shard.write;
        }
        total.read = ServiceTimes::of(&read);
        total.write = ServiceTimes::of(&write);
        total
    }

    fn shard(&self, shard: ShardId) -> MutexGuard<'_, Shard> {
        self.shards[shard.0].lock().expect("no thread panics while it counts")
    }
}

fn record(times: &mut Histogram<u64>, took: Duration) {
    times.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
}

impl ServiceTimes {
    fn of(times: &Histogram<u64>) -> ServiceTimes {
        let us = |ns: u64| ns as f64 / 1e3;
        let mut buckets = vec![0; BUCKETS_US.len()];
        for step in times.iter_recorded() {
            let bound = BUCKETS_US.partition_point(|bound| bound * 1000 < step.value_iterated_to());
            if let Some(bucket) = buckets.get_mut(bound) {
                *bucket += step.count_at_value();
            }
        }
        ServiceTimes {
            count: times.len(),
            sum_us: times.mean() * times.len() as f64 / 1e3,
            p50_us: us(times.value_at_quantile(0.5)),
            p90_us: us(times.value_at_quantile(0.9)),
            p99_us: us(times.value_at_quantile(0.99)),
            max_us: us(times.max()),
            buckets,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_add_up() {
        let metrics = Metrics::default();
        for at in 0..20u32 {
            let shard = metrics.connected();
            metrics.read(shard, 3, 1, Duration::from_micros(10));
            metrics.written(shard, 2, Duration::from_micros(300));
            metrics.discarded(shard, at);
            metrics.refused(shard, Refusal::Corrupt(at));
        }
        metrics.disconnected();
        metrics.written(ShardId(0), 1, Duration::from_secs(3600));
        let total = metrics.total();
        assert_eq!((total.connections, total.connections_total), (19, 20));
        assert_eq!((total.pages_read, total.zero_pages_read), (60, 20));
        assert_eq!((total.pages_written, total.pages_discarded), (41, 190));
        assert_eq!(total.refusals, Refusals { corrupt: 20, ..Refusals::default() });
        assert_eq!(total.read.count, 20);
        assert!((total.read.p50_us - 10.0).abs() < 0.2, "{:?}", total.read);
        assert!((total.read.sum_us - 200.0).abs() < 4.0, "{:?}", total.read);
        assert_eq!(total.write.count, 21);
        assert_eq!(total.write.buckets.iter().sum::<u64>(), 20, "an hour is in no bucket");
    }
}
