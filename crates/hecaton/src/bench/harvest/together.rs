//! Several guests that give at the same time (section 6.2 of the paper: four give four times as
//! much).

use super::{
    Bench,
    guest::{Guest, Starting},
    plan::End,
    shrink::{Wish, shrink},
    ways::Way,
};
use crate::bench::measure::stats::Spread;
use crate::report::plot::{Group, bars};
use crate::terminal::table::Table;
use anyhow::{Context as _, ensure};
use serde::Serialize;
use std::fmt::Write as _;

/// Most guests.
const MOST: usize = 3;

/// Results, one row for each number of guests.
#[derive(Serialize)]
pub(super) struct Together {
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    guests: usize,
    /// Rate of all guests together.
    mib_per_s: Spread,
    /// Against one guest in the same round.
    to_one: Spread,
}

pub(super) fn run(bench: &Bench<'_>) -> anyhow::Result<Together> {
    bench.say(&format!("together: {MOST} guests come up"));
    let start = |number: usize| {
        Starting::new(bench.kit, &format!("together-{number}"), "", bench.sizes, bench.dir)
    };
    let starting = (0..MOST).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let guests = starting.into_iter().map(Starting::wait_up);
    let mut guests = guests.collect::<anyhow::Result<Vec<_>>>()?;
    let mut rounds = Vec::new();
    for round in 0..bench.rounds {
        let mut speeds = [0.0; MOST];
        for turn in 0..MOST {
            let count = (turn + round) % MOST + 1;
            let speed = measure(bench, &mut guests[..count])?;
            bench.say(&format!("together: {count}, round {}: {speed:.0} MiB/s", round + 1));
            speeds[count - 1] = speed;
        }
        rounds.push(speeds);
    }
    rows(&rounds).map(|rows| Together { rows })
}

/// MiB/s that these guests give, together.
fn measure(bench: &Bench<'_>, guests: &mut [Guest<'_>]) -> anyhow::Result<f64> {
    let wish = Wish {
        way: Way::Stock,
        target: bench.sizes.device - bench.sizes.reclaim,
        batch: bench.sizes.batch,
        limit: bench.limit,
    };
    let given = shrink(&mut guests.iter_mut().collect::<Vec<_>>(), wish)?;
    ensure!(
        given.iter().all(|given| given.end == End::All),
        "an idle guest does not give: {given:?}"
    );
    guests.iter_mut().try_for_each(|guest| guest.grow().map(drop))?;
    let bytes: u64 = given.iter().map(|given| given.bytes).sum();
    let seconds = given.iter().map(|given| given.seconds).fold(0.0, f64::max);
    Ok(bytes as f64 / f64::from(1 << 20) / seconds)
}

/// A bar for each number of guests.
pub(super) fn html(together: &Together, body: &mut String) {
    let group = |row: &Row| Group {
        label: format!("{} guests", row.guests),
        values: vec![row.mib_per_s.median],
    };
    let groups: Vec<_> = together.rows.iter().map(group).collect();
    let _ = writeln!(
        body,
        "<figure><h3>MiB/s that several idle guests give at once, stock settings</h3>{}</figure>",
        bars(&groups, "MiB/s", 500.0, 260.0)
    );
}

fn rows(rounds: &[[f64; MOST]]) -> anyhow::Result<Vec<Row>> {
    let row = |guests: usize| {
        let of = |value: fn(&[f64; MOST], usize) -> f64| {
            let values: Vec<_> = rounds.iter().map(|round| value(round, guests - 1)).collect();
            Spread::of(&values).context("no round")
        };
        let mib_per_s = of(|round, at| round[at])?;
        let to_one = of(|round, at| round[at] / round[0])?;
        Ok(Row { guests, mib_per_s, to_one })
    };
    (1..=MOST).map(row).collect()
}

pub(super) fn show(together: &Together) {
    println!("MiB/s given by several idle guests at once, stock settings");
    let mut table = Table::figures(["guests", "MiB/s", "least", "most", "to one", "least", "most"]);
    for row in &together.rows {
        let (speed, ratio) = (row.mib_per_s, row.to_one);
        table.row([
            row.guests.to_string(),
            format!("{:.0}", speed.median),
            format!("{:.0}", speed.min),
            format!("{:.0}", speed.max),
            format!("{:.2}", ratio.median),
            format!("{:.2}", ratio.min),
            format!("{:.2}", ratio.max),
        ]);
    }
    print!("{table}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_are_compared_with_one_of_the_same_round() {
        let rows = rows(&[[100.0, 150.0, 200.0], [200.0, 400.0, 300.0]]).unwrap();
        let of: Vec<_> =
            rows.iter().map(|row| (row.guests, row.to_one.min, row.to_one.max)).collect();
        assert_eq!(of, [(1, 1.0, 1.0), (2, 1.5, 2.0), (3, 1.5, 2.0)]);
        assert_eq!(rows[1].mib_per_s, Spread { median: 275.0, min: 150.0, max: 400.0 });
        assert!(super::rows(&[]).is_err());
    }
}
