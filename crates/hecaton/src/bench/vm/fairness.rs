//! Whether a guest whose memory is asked for now and then is served while another one storms.
//!
//! A storm keeps processors busy too: of guest, pager and donors. So that the processors are not
//! taken for the paging, there is a run beside the same guest doing the same on memory that is all
//! local.

use super::{
    Bench,
    faults::fill_and_drive_out,
    usage::{Totals, Usage},
};
use crate::bench::fault;
use crate::bench::machine::Memory;
use crate::bench::measure::stats::Percentiles;
use crate::bench::measure::wire;
use crate::bench::program::guest::Request;
use crate::terminal::table::Table;
use hecaton_memory::{pages_for_bytes, pages_to_bytes};
use serde::Serialize;

/// Pages of the quiet guest that are touched each time.
const SAMPLES: u64 = 3000;

/// Threads of the storm; a guest has two processors.
const THREADS: u32 = 2;

/// Latencies of a quiet guest's faults, beside a storm and without one.
#[derive(Serialize)]
pub(super) struct Fairness {
    guest: Neighbours,
    program: Neighbours,
    /// Pages in a second that the storming guest wrote to with its memory local, and with it
    /// remote.
    busy_pages_per_s: f64,
    storm_pages_per_s: f64,
    /// Cost of paging for the storm; the donors' part includes that for the quiet neighbours.
    storm: Usage,
}

/// First touches of pages that are at donors,
#[derive(Serialize)]
struct Neighbours {
    /// with nobody else there,
    alone: Percentiles,
    /// beside a guest that writes to local memory as fast as it can,
    beside_busy: Percentiles,
    /// beside the same guest when most of what it writes to is remote.
    beside_storm: Percentiles,
}

pub(super) fn run(bench: &Bench<'_>) -> anyhow::Result<Fairness> {
    let cluster = bench.two_donors;
    let quiet_bytes = bench.memory / 2;
    let region = pages_for_bytes(quiet_bytes / 4);
    let storm_pages = pages_for_bytes(bench.memory / 2);
    bench.say("fair shares: two guests come up");
    let pool = Memory::Pool { cluster, local: quiet_bytes };
    let mut quiet = bench.start("quiet", quiet_bytes, pool)?;
    let mut other =
        bench.start("storm", bench.memory, Memory::Pool { cluster, local: bench.memory })?;
    quiet.wait_up()?;
    other.wait_up()?;
    let wire = wire::serve()?;

    let mut measure = || -> anyhow::Result<(Percentiles, Percentiles)> {
        fill_and_drive_out(&mut quiet, region, quiet_bytes)?;
        let guest = quiet.touch(SAMPLES.min(region))?.faulted;
        let program = fault::quiet(cluster, wire, SAMPLES * 2, SAMPLES)?.fault;
        Ok((guest, program))
    };
    bench.say("fair shares: faults of a guest and of a program that are alone");
    let alone = measure()?;
    bench.say("fair shares: the same, beside a guest that is busy with local memory");
    other.perform(&Request::Storm { pages: storm_pages, threads: THREADS })?;
    let busy = measure()?;
    let busy_pages_per_s = other.calm()?;
    bench.say("fair shares: the same, beside a guest that storms");
    other.perform(&Request::Storm { pages: storm_pages, threads: THREADS })?;
    other.resize_local(pages_to_bytes(storm_pages) / 4)?;
    let before = Totals::now(cluster, &other.name)?;
    let storm = measure()?;
    let moved = Totals::now(cluster, &other.name)?.since(&before);
    let storm_pages_per_s = other.calm()?;
    Ok(Fairness {
        guest: Neighbours { alone: alone.0, beside_busy: busy.0, beside_storm: storm.0 },
        program: Neighbours { alone: alone.1, beside_busy: busy.1, beside_storm: storm.1 },
        busy_pages_per_s,
        storm_pages_per_s,
        storm: moved,
    })
}

pub(super) fn show(fairness: &Fairness) {
    println!("A fault beside another guest");
    let mut table = Table::figures(["", "p50 µs", "p90 µs", "p99 µs", "max µs"]);
    for (who, neighbours) in [("guest", &fairness.guest), ("program", &fairness.program)] {
        for (beside, of) in [
            ("alone", &neighbours.alone),
            ("beside one that is busy with local memory", &neighbours.beside_busy),
            ("beside one that storms", &neighbours.beside_storm),
        ] {
            let us = |value: f64| format!("{value:.1}");
            let [p50, p90, p99, max] = [of.p50_us, of.p90_us, of.p99_us, of.max_us].map(us);
            table.row([format!("a {who}'s, {beside}"), p50, p90, p99, max]);
        }
    }
    print!("{table}");
    println!(
        "  the other wrote to {:.0} pages a second with local memory, to {:.0} when it stormed; {}",
        fairness.busy_pages_per_s, fairness.storm_pages_per_s, fairness.storm
    );
}
