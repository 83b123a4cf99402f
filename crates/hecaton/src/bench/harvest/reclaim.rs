//! Figures 6 and 7 of the paper: how fast one guest gives its memory back, in all ways and under
//! all loads.

use super::{
    Bench,
    guest::{Guest, Starting},
    loads::Load,
    plan::{self, End, Given, Turn},
    shrink::{Wish, shrink},
    ways::Way,
};
use crate::bench::measure::stats::Spread;
use crate::bench::world::interrupt;
use crate::report::{
    key,
    plot::{Group, bars},
};
use crate::terminal::table::Table;
use serde::Serialize;
use std::{fmt::Write as _, thread, time::Duration};

/// Time that a new manager needs to look at its guest.
const SETTLE: Duration = Duration::from_secs(1);

/// Results, one row for each load.
#[derive(Serialize)]
pub(super) struct Reclaim {
    rows: Vec<Row>,
}

/// A load.
#[derive(Serialize)]
struct Row {
    load: Load,
    ways: Vec<plan::Result>,
    /// How fast the guest takes what it has given.
    #[serde(skip_serializing_if = "Option::is_none")]
    grow_mib_per_s: Option<Spread>,
    /// That against giving with stock settings, medians.
    #[serde(skip_serializing_if = "Option::is_none")]
    grow_to_shrink: Option<f64>,
    /// Why there is not more.
    #[serde(skip_serializing_if = "Option::is_none")]
    failure: Option<String>,
}

/// Samples so far, also if the measurement fails.
#[derive(Default)]
struct Samples {
    given: Vec<(Turn, Given)>,
    /// Rates of each guest.
    grown_mib_per_s: Vec<Vec<f64>>,
}

pub(super) fn run(bench: &Bench<'_>) -> anyhow::Result<Reclaim> {
    let mut rows = Vec::new();
    let is_wanted = |load: &Load| bench.loads.is_empty() || bench.loads.contains(load);
    for loads in Load::TOGETHER {
        let loads: Vec<_> = loads.iter().copied().filter(is_wanted).collect();
        if loads.is_empty() {
            continue;
        }
        let mut samples = Samples::default();
        let measured = measure(bench, &loads, &mut samples);
        interrupt::check()?;
        let failure = measured.err().map(|error| format!("{error:#}"));
        for (guest, load) in loads.iter().enumerate() {
            rows.push(row(*load, guest, &samples, failure.clone()));
        }
    }
    Ok(Reclaim { rows })
}

impl Reclaim {
    /// Whether all could be measured.
    pub(super) fn is_whole(&self) -> bool {
        self.rows.iter().all(|row| row.failure.is_none())
    }
}

fn row(load: Load, guest: usize, samples: &Samples, failure: Option<String>) -> Row {
    let ways: Vec<_> =
        Way::ALL.into_iter().map(|way| plan::result(&samples.given, guest, way)).collect();
    let grown = samples.grown_mib_per_s.get(guest);
    let grow_mib_per_s = grown.and_then(|speeds| Spread::of(speeds));
    let stock = ways[0].mib_per_s;
    let grow_to_shrink =
        grow_mib_per_s.zip(stock).map(|(grow, shrink)| grow.median / shrink.median);
    Row { load, ways, grow_mib_per_s, grow_to_shrink, failure }
}

/// All ways with guests under these loads.
fn measure(bench: &Bench<'_>, loads: &[Load], samples: &mut Samples) -> anyhow::Result<()> {
    let name = |load: &Load| load.name();
    bench
        .say(&format!("{}: guests come up", loads.iter().map(name).collect::<Vec<_>>().join(", ")));
    let start =
        |load: &Load| Starting::new(bench.kit, load.name(), load.kernel(), bench.sizes, bench.dir);
    let starting = loads.iter().map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let guests = starting.into_iter().map(Starting::wait_up);
    let mut guests = guests.collect::<anyhow::Result<Vec<_>>>()?;
    for (load, guest) in loads.iter().zip(&mut guests) {
        load.start(guest)?;
    }
    samples.grown_mib_per_s = vec![Vec::new(); loads.len()];
    for turn in plan::turns(bench.rounds, loads.len()) {
        let (load, guest) = (loads[turn.guest], &mut guests[turn.guest]);
        let measured = measure_one(bench, load, guest, turn.way);
        let (given, grown) = measured.map_err(|error| {
            error.context(format!("the guest's last words: {}", guest.last_words()))
        })?;
        bench.say(&format!(
            "{load}, {}, round {}: {} MiB in {:.2} s{}{}",
            turn.way,
            turn.round + 1,
            given.bytes >> 20,
            given.seconds,
            given
                .ready_seconds
                .map_or_else(String::new, |s| format!(", {s:.2} until it was ready")),
            match given.end {
                End::All => "",
                End::GivenUp => ", given up",
                End::Killed => ", and its application is dead",
            }
        ));
        samples.given.push((turn, given));
        samples.grown_mib_per_s[turn.guest].push(grown);
    }
    Ok(())
}

/// Measures the memory that the guest gives, and how fast it takes that memory back, in MiB/s.
fn measure_one(
    bench: &Bench<'_>,
    load: Load,
    guest: &mut Guest<'_>,
    way: Way,
) -> anyhow::Result<(Given, f64)> {
    guest.start_manager(way, load)?;
    load.wait_full(guest, bench.sizes.reserve)?;
    thread::sleep(SETTLE);
    let wish = Wish {
        way,
        target: bench.sizes.device - bench.sizes.reclaim,
        batch: bench.sizes.batch,
        limit: bench.limit,
    };
    let mut given = shrink(&mut [guest], wish)?.swap_remove(0);
    guest.end_manager()?;
    let (bytes, seconds) = guest.grow()?;
    if load.was_killed(guest)? {
        given.end = End::Killed;
        load.start(guest)?;
    }
    Ok((given, bytes as f64 / f64::from(1 << 20) / seconds))
}

pub(super) fn show(reclaim: &Reclaim) {
    println!("MiB/s given by one guest, and against stock settings in the same round");
    let mut table = Table::new([
        "load",
        "way",
        ">MiB/s",
        ">least",
        ">most",
        ">to stock",
        ">least",
        ">most",
        ">times",
        ">given up",
        ">killed",
    ]);
    let number = |value: Option<f64>, digits: usize| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.digits$}"))
    };
    for row in &reclaim.rows {
        for result in &row.ways {
            let (speed, ratio) = (result.mib_per_s, result.to_stock);
            table.row([
                row.load.to_string(),
                result.way.to_string(),
                number(speed.map(|speed| speed.median), 0),
                number(speed.map(|speed| speed.min), 0),
                number(speed.map(|speed| speed.max), 0),
                number(ratio.map(|ratio| ratio.median), 2),
                number(ratio.map(|ratio| ratio.min), 2),
                number(ratio.map(|ratio| ratio.max), 2),
                result.measured.to_string(),
                result.given_up.to_string(),
                result.killed.to_string(),
            ]);
        }
    }
    print!("{table}");
    for row in &reclaim.rows {
        if let (Some(grow), Some(ratio)) = (row.grow_mib_per_s, row.grow_to_shrink) {
            println!(
                "  {}: taken again at {:.0} MiB/s ({:.0} to {:.0}), {ratio:.1} times as fast as given with \
                 stock settings",
                row.load, grow.median, grow.min, grow.max
            );
        }
        for result in &row.ways {
            if let Some(ratio) = result.to_reactive {
                println!(
                    "  {}: {} gives {:.2} times ({:.2} to {:.2}) as fast as {}, where it is told nothing",
                    row.load,
                    result.way,
                    ratio.median,
                    ratio.min,
                    ratio.max,
                    Way::REACTIVE
                );
            }
        }
        if let Some(failure) = &row.failure {
            println!("  {}: not all could be measured: {failure}", row.load);
        }
    }
}

/// Figures 6 and 7 of the paper: a group of bars for each load, a bar for each way.
pub(super) fn html(reclaim: &Reclaim, body: &mut String) {
    let bar = |result: &plan::Result| result.mib_per_s.map_or(0.0, |speed| speed.median);
    let group = |row: &Row| Group {
        label: row.load.to_string(),
        values: row.ways.iter().map(bar).collect(),
    };
    let groups: Vec<_> = reclaim.rows.iter().map(group).collect();
    let names = Way::ALL.into_iter().enumerate();
    let keys: String = names.map(|(colour, way)| key(colour, &way.to_string())).collect();
    let _ = writeln!(
        body,
        "<h2>Giving memory back</h2><p>Medians. A bar that is missing: the guest\u{2019}s kernel killed the application each time, or \
         nothing was given.</p><figure><h3>MiB/s that a guest gives, by load and way{keys}</h3>{}</figure>",
        bars(&groups, "MiB/s", 1000.0, 340.0)
    );
}
