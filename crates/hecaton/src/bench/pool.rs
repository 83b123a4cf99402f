//! `bench pool`: data stored on the donors through the page protocol, read back and verified.
//!
//! Works on machines that allow no userfaultfd: it measures everything below the pager. The
//! yardsticks are one plain TCP stream and plain round trips, taken before and after.

use super::Common;
use crate::bench::measure::region::noise;
use crate::bench::measure::stats::{Latencies, Percentiles, Spread};
use crate::bench::measure::wire::{self, Wire};
use crate::bench::world::cluster::Cluster;
use crate::terminal::table::Table;
use anyhow::{Context as _, bail, ensure};
use hecaton_memory::{
    Epoch, PAGE_SIZE, PageNo, PageSum, Size, SpaceId, SplitMix, page_sum, pages_for_bytes,
    pages_to_bytes,
};
use hecaton_space::{Completion, Directory, DonorAddress, Lane, Space, SpaceConfig};
use hecaton_transport::protocol::MAX_PAGES;
use serde::Serialize;
use std::{
    hash::{BuildHasher as _, Hasher as _, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

/// Arguments of `bench pool`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How much is stored.
    #[arg(long, default_value = "1G")]
    size: Size,
    #[command(flatten)]
    common: Common,
}

/// Reads of [`MAX_PAGES`] pages under way at a time.
const READS_AHEAD: u64 = 8;

/// Single pages read one by one, each with a plain round trip beside it.
const SINGLES: u64 = 5_000;

/// The longest silence of the donors that is borne.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Serialize)]
struct Result {
    bytes: u64,
    store_gbps: f64,
    read_gbps: f64,
    tcp_gbps: f64,
    page_read_p50_us: f64,
    page_read_p90_us: f64,
    page_read_p99_us: f64,
    tcp_rtt_p50_us: f64,
    /// Single page read to round trip, medians.
    ratio: f64,
    verified_pages: u64,
    donors: Vec<DonorShare>,
}

#[derive(Serialize)]
struct DonorShare {
    name: String,
    bytes: u64,
}

struct Donors(Vec<DonorAddress>);

impl Directory for Donors {
    fn donors(&self) -> Vec<DonorAddress> {
        self.0.clone()
    }
}

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    let size = if common.quick { Size(args.size.0.min(128 << 20)) } else { args.size };
    let pages = pages_for_bytes(size.0);
    ensure!(pages > 0, "--size {size} is not a page");
    let scratch = common.scratch()?;
    let cluster =
        Cluster::find_or_start(common.manager.as_deref(), size.0 / 4 * 5, scratch.path())?;
    let donors = cluster.donors()?;
    let id = SpaceId(RandomState::new().build_hasher().finish());
    let config = SpaceConfig::new(id, Epoch(1), "bench-pool", pages);
    let space = Space::create(config, Arc::new(Donors(donors)))?;
    let result = measure(common, &space, pages);
    let released = space.release();
    let result = result?;
    released.context("the donors keep what was stored until its lease ends")?;

    if common.json {
        println!("{}", serde_json::to_string_pretty(&result)?);
        return Ok(());
    }
    show(&result);
    Ok(())
}

fn measure(common: &Common, space: &Arc<Space>, pages: u64) -> anyhow::Result<Result> {
    let mut lane = space.lane()?;
    let mut wire = Wire::connect(wire::serve()?)?;
    let gbps = |elapsed: Duration| pages_to_bytes(pages) as f64 / elapsed.as_secs_f64() / 1e9;
    let mut tcp = vec![gbps(wire.ask(pages_to_bytes(pages))?)];

    common.say(&format!("storing {}", Size(pages_to_bytes(pages))));
    let (sums, stored) = store(&mut lane, pages)?;
    tcp.push(gbps(wire.ask(pages_to_bytes(pages))?));
    common.say("reading it back");
    let read = read_back(&mut lane, &sums)?;
    tcp.push(gbps(wire.ask(pages_to_bytes(pages))?));
    common.say("reading single pages");
    let (single, round_trip) = read_singles(&mut lane, &mut wire, &sums)?;

    let donors = space.status().donors.into_iter();
    Ok(Result {
        bytes: pages_to_bytes(pages),
        store_gbps: gbps(stored),
        read_gbps: gbps(read),
        tcp_gbps: Spread::of(&tcp).context("nothing was streamed")?.median,
        page_read_p50_us: single.p50_us,
        page_read_p90_us: single.p90_us,
        page_read_p99_us: single.p99_us,
        tcp_rtt_p50_us: round_trip.p50_us,
        ratio: single.p50_us / round_trip.p50_us,
        verified_pages: pages,
        donors: donors
            .map(|donor| DonorShare { name: donor.name, bytes: donor.bytes_held })
            .collect(),
    })
}

/// The pages of a batch: the one with this number, of `pages` in all.
fn batch(number: u64, pages: u64) -> Vec<PageNo> {
    let first = number * MAX_PAGES as u64;
    (first..pages.min(first + MAX_PAGES as u64)).collect()
}

/// Stores different pages that do not compress. The time to generate them is not counted.
fn store(lane: &mut Lane, pages: u64) -> anyhow::Result<(Vec<PageSum>, Duration)> {
    let mut data = vec![0; MAX_PAGES * PAGE_SIZE];
    for (chunk, seed) in data.chunks_exact_mut(PAGE_SIZE).zip(0..) {
        for (bytes, word) in chunk.chunks_exact_mut(8).zip(noise(seed)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }
    let mut all_sums = Vec::with_capacity(pages as usize);
    let mut elapsed = Duration::ZERO;
    for number in 0..pages.div_ceil(MAX_PAGES as u64) {
        let batch = batch(number, pages);
        let data = &mut data[..batch.len() * PAGE_SIZE];
        for (page, content) in batch.iter().zip(data.chunks_exact_mut(PAGE_SIZE)) {
            content[..8].copy_from_slice(&page.to_le_bytes());
        }
        let start = Instant::now();
        let sums: Vec<_> = data.chunks_exact(PAGE_SIZE).map(page_sum).collect();
        lane.write(number, &batch, &sums, &[data])?;
        // Whatever has been confirmed meanwhile; a failure ends the bench.
        step(lane, Duration::ZERO, &mut |_, _, _| {})?;
        elapsed += start.elapsed();
        all_sums.extend(sums);
        crate::bench::world::interrupt::check()?;
    }
    let start = Instant::now();
    finish(lane, &mut |_, _, _| {})?;
    Ok((all_sums, elapsed + start.elapsed()))
}

fn read_back(lane: &mut Lane, sums: &[PageSum]) -> anyhow::Result<Duration> {
    let pages = sums.len() as u64;
    let (mut verified, mut wrong) = (0, None);
    let mut check = |token: u64, from: usize, data: &[u8]| {
        let first = token * MAX_PAGES as u64 + from as u64;
        for (page, content) in (first..).zip(data.chunks_exact(PAGE_SIZE)) {
            verified += 1;
            if page_sum(content) != sums[page as usize] {
                wrong = wrong.or(Some(page));
            }
        }
    };
    let start = Instant::now();
    for number in 0..pages.div_ceil(MAX_PAGES as u64) {
        lane.read(number, &batch(number, pages))?;
        while lane.in_flight() as u64 >= READS_AHEAD {
            step(lane, PATIENCE, &mut check)?;
        }
        crate::bench::world::interrupt::check()?;
    }
    finish(lane, &mut check)?;
    let elapsed = start.elapsed();
    if let Some(page) = wrong {
        bail!("page {page} came back with other contents than it was stored with");
    }
    ensure!(verified == pages, "{verified} of {pages} pages came back");
    Ok(elapsed)
}

fn read_singles(
    lane: &mut Lane,
    wire: &mut Wire,
    sums: &[PageSum],
) -> anyhow::Result<(Percentiles, Percentiles)> {
    let (mut reads, mut round_trips) = (Latencies::new(), Latencies::new());
    let mut random = SplitMix::new(sums.len() as u64);
    for _ in 0..SINGLES {
        let page = random.draw() % sums.len() as u64;
        let mut matches = false;
        let start = Instant::now();
        lane.read(page, &[page])?;
        finish(lane, &mut |_, _, data| matches = page_sum(data) == sums[page as usize])?;
        reads.record(start.elapsed());
        ensure!(matches, "page {page} came back with other contents than it was stored with");
        round_trips.record(wire.ask(PAGE_SIZE as u64)?);
    }
    Ok((reads.percentiles(), round_trips.percentiles()))
}

/// Called with a read's token, where in its list the pages begin, and their contents.
type OnPages<'a> = &'a mut dyn FnMut(u64, usize, &[u8]);

fn step(lane: &mut Lane, wait: Duration, on_pages: OnPages<'_>) -> anyhow::Result<()> {
    let mut failure = None;
    lane.progress(Some(wait), &mut |completion| match completion {
        Completion::Read { token, from, data, .. } => on_pages(token, from, data),
        Completion::Written { .. } => {}
        Completion::Failed { error, .. } => failure = Some(error),
    });
    failure.map_or(Ok(()), |error| Err(error.into()))
}

fn finish(lane: &mut Lane, on_pages: OnPages<'_>) -> anyhow::Result<()> {
    while lane.in_flight() > 0 {
        step(lane, PATIENCE, on_pages)?;
    }
    Ok(())
}

fn show(result: &Result) {
    let shares: Vec<_> =
        result.donors.iter().map(|donor| format!("{} {}", Size(donor.bytes), donor.name)).collect();
    println!(
        "{} stored on {} donors ({}), read back and verified",
        Size(result.bytes),
        result.donors.len(),
        shares.join(", ")
    );
    let mut table = Table::figures(["", "GB/s", "to TCP"]);
    for (name, gbps) in [
        ("store", result.store_gbps),
        ("read back", result.read_gbps),
        ("one plain TCP stream", result.tcp_gbps),
    ] {
        let ratio = gbps / result.tcp_gbps;
        table.row([name.to_owned(), format!("{gbps:.2}"), format!("{ratio:.2} ×")]);
    }
    print!("{table}");
    println!(
        "one page: p50 {:.1} µs, p90 {:.1} µs, p99 {:.1} µs; {:.2} × a plain round trip of {:.1} µs",
        result.page_read_p50_us,
        result.page_read_p90_us,
        result.page_read_p99_us,
        result.ratio,
        result.tcp_rtt_p50_us
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_cover_every_page_once() {
        let pages = MAX_PAGES as u64 * 3 + 17;
        let all: Vec<_> =
            (0..pages.div_ceil(MAX_PAGES as u64)).flat_map(|number| batch(number, pages)).collect();
        assert!(all.into_iter().eq(0..pages));
    }
}
