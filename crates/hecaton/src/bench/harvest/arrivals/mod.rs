//! Measures how long regular VMs wait for creation while a harvest VM holds the memory that is left
//! over. Replays an hour of arrivals with buffers of several sizes, as the servers of table 2 of
//! the paper (section 6.4) and its figure 11.
//!
//! The broker alone replays the hour in full size, for ten hosts. Real machines under a real agent
//! replay it at a 64th of the sizes and in less time.

mod host;
mod model;
mod replay;
mod trace;

use super::Bench;
use crate::bench::world::interrupt;
use crate::report::plot::{self, Band, Group};
use crate::report::{self, key};
use crate::terminal::table::Table;
use model::Outcome;
use replay::{CLASSES, Course};
use serde::Serialize;
use std::fmt::Write as _;

/// Sizes of the hour are so many times those of its replay.
const SCALE: f64 = 64.0;

/// GiB of the hour that nobody harvests. The last one has room for the largest arrival, and
/// suffices.
const BUFFERS_GIB: [f64; 4] = [0.0, 8.0, 32.0, 64.0];

/// Buffers of the replay with real machines, in GiB of the hour.
const REPLAYED_GIB: [f64; 3] = [0.0, 8.0, 64.0];

/// Hosts of the ten, with real machines.
const HOSTS: usize = 2;

/// Rates at which a harvest VM gives memory in the model. The first is that of the paper's table 2.
/// The second is about that of an idle emulated guest in the best way ([`super::reclaim`]).
const RATES: [(&str, f64); 2] = [("8.5 GB/s", 8.5e9), ("1 GiB/s", (1 << 30) as f64)];

/// Results of the model and of the replay.
#[derive(Serialize)]
pub(super) struct Arrivals {
    source: &'static str,
    /// Sizes of the replay are a part of the hour's.
    scale: f64,
    /// Seconds in which the replay runs the hour.
    hour_s: f64,
    replayed: Vec<Row>,
    modelled: Vec<Row>,
    #[serde(skip)]
    courses: Vec<(String, Course)>,
    /// Why there is not more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failure: Option<String>,
}

/// A buffer, and how long regular VMs have waited with it.
#[derive(Serialize)]
struct Row {
    /// The host of the replay; of the model, all ten.
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<usize>,
    /// Rate at which the harvest VM gives memory; only in the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<&'static str>,
    /// In GiB of the hour.
    buffer_gib: f64,
    creations: usize,
    /// Those that were not admitted when the agent first looked.
    waited: usize,
    median_s: f64,
    p99_s: f64,
    max_s: f64,
    sum_s: f64,
    /// Average memory of harvest VMs beyond their minima, in GiB of the hour.
    harvested_gib: f64,
}

impl Row {
    fn of(outcome: &Outcome, buffer_gib: f64) -> Self {
        let mut delays = outcome.delays_s.clone();
        delays.sort_by(f64::total_cmp);
        Self {
            host: None,
            rate: None,
            buffer_gib,
            creations: delays.len(),
            waited: delays.iter().filter(|delay| **delay > 0.0).count(),
            median_s: quantile(&delays, 0.5),
            p99_s: quantile(&delays, 0.99),
            max_s: delays.last().copied().unwrap_or(0.0),
            sum_s: delays.iter().sum(),
            harvested_gib: outcome.harvested_gib,
        }
    }
}

/// The least of the values, in order, that is not exceeded by this part of them.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

pub(super) fn run(bench: &Bench<'_>, hour_s: f64) -> anyhow::Result<Arrivals> {
    let hours = trace::hours()?;
    let mut modelled = Vec::new();
    for (name, rate) in RATES {
        for buffer_gib in BUFFERS_GIB {
            let outcomes = hours.iter().map(|hour| model::replay(hour, buffer_gib, rate));
            let outcomes = outcomes.collect::<anyhow::Result<Vec<_>>>()?;
            modelled.push(Row { rate: Some(name), ..Row::of(&together(&outcomes), buffer_gib) });
        }
    }
    let mut arrivals = Arrivals {
        source: trace::SOURCE,
        scale: SCALE,
        hour_s,
        replayed: Vec::new(),
        modelled,
        courses: Vec::new(),
        failure: None,
    };
    let hosts = if bench.rounds > 1 { HOSTS } else { 1 };
    for (host, hour) in hours.iter().take(hosts).enumerate() {
        for buffer_gib in REPLAYED_GIB {
            bench.say(&format!("arrivals: host {host}, a buffer of {buffer_gib} GiB / {SCALE}"));
            match replay::replay(bench, hour, buffer_gib, hour_s) {
                Ok((outcome, course)) => {
                    let row = Row { host: Some(host), ..Row::of(&outcome, buffer_gib) };
                    bench.say(&format!(
                        "arrivals: {} of {} waited, {:.2} s at most",
                        row.waited, row.creations, row.max_s
                    ));
                    arrivals.replayed.push(row);
                    let name = format!("host {host}, buffer of {buffer_gib} GiB");
                    arrivals.courses.push((name, course));
                }
                Err(error) => {
                    interrupt::check()?;
                    arrivals.failure = Some(format!("{error:#}"));
                    return Ok(arrivals);
                }
            }
        }
    }
    Ok(arrivals)
}

/// All hosts as one.
fn together(outcomes: &[Outcome]) -> Outcome {
    let harvested: f64 = outcomes.iter().map(|outcome| outcome.harvested_gib).sum();
    Outcome {
        delays_s: outcomes.iter().flat_map(|outcome| outcome.delays_s.clone()).collect(),
        harvested_gib: harvested / outcomes.len().max(1) as f64,
    }
}

const HEAD: [&str; 9] = [
    "",
    ">buffer GiB",
    ">created",
    ">waited",
    ">median s",
    ">p99",
    ">most",
    ">sum",
    ">harvested GiB",
];

fn cells(row: &Row) -> [String; 9] {
    let name = row.rate.map(str::to_owned);
    let host = row.host.map_or_else(String::new, |host| format!("host {host}"));
    [
        name.unwrap_or(host),
        format!("{}", row.buffer_gib),
        row.creations.to_string(),
        row.waited.to_string(),
        format!("{:.2}", row.median_s),
        format!("{:.2}", row.p99_s),
        format!("{:.2}", row.max_s),
        format!("{:.2}", row.sum_s),
        format!("{:.0}", row.harvested_gib),
    ]
}

pub(super) fn show(arrivals: &Arrivals) {
    println!("Regular VMs that are created in one hour. {}", arrivals.source);
    for (title, rows) in [
        ("with guests, a 64th of the sizes", &arrivals.replayed),
        ("the broker alone, 10 hosts in full size", &arrivals.modelled),
    ] {
        println!("\n{title}");
        let mut table = Table::new(HEAD);
        rows.iter().for_each(|row| table.row(cells(row)));
        print!("{table}");
    }
    if let Some(failure) = &arrivals.failure {
        println!("  not all could be measured: {failure}");
    }
}

/// The same for a report.
pub(super) fn html(arrivals: &Arrivals, body: &mut String) {
    let _ = writeln!(
        body,
        "<h2>Creating regular VMs</h2><p>One hour of arrivals and departures. A harvest VM has what nobody needs but for a \
         buffer; how long regular VMs wait for their memory depends on that. <span class=\"soft\">Trace: {}.</span></p>",
        arrivals.source
    );
    for (title, rows) in [
        (
            format!(
                "Real machines under a real agent: sizes are a {SCALE}th, and the hour takes {} s; buffer and what is harvested are \
                 in the hour's GiB, delays as they were",
                arrivals.hour_s
            ),
            &arrivals.replayed,
        ),
        ("The broker alone, ten hosts in full size".to_owned(), &arrivals.modelled),
    ] {
        let table = report::table(HEAD, rows.iter().map(cells));
        let _ = writeln!(body, "<h3>{title}</h3>{table}");
    }
    let group = |row: &Row| Group {
        label: format!("{} GiB, {}", row.buffer_gib, row.rate.unwrap_or_default()),
        values: vec![row.sum_s],
    };
    let groups: Vec<_> = arrivals.modelled.iter().map(group).collect();
    let _ = writeln!(
        body,
        "<figure><h3>All that regular VMs of ten hosts wait in the hour, by buffer and rate (the broker alone)</h3>{}</figure>",
        plot::bars(&groups, "s", 1000.0, 300.0)
    );
    for (name, course) in &arrivals.courses {
        let bands = CLASSES.iter().zip([0, 2, 4, 7]).zip(&course.classes).map(
            |((name, colour), values)| Band {
                colour,
                name: (*name).to_owned(),
                values: values.clone(),
            },
        );
        let bands: Vec<_> = bands.collect();
        let keys: String = bands.iter().rev().map(|band| key(band.colour, &band.name)).collect();
        let svg = plot::areas(&bands, &course.times_s, 5.0, "MiB", (1000.0, 240.0));
        let _ = writeln!(body, "<figure><h3>{name}{keys}</h3>{svg}</figure>");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hour_needs_no_more_than_the_largest_buffer() {
        for hour in trace::hours().unwrap() {
            let last = BUFFERS_GIB[BUFFERS_GIB.len() - 1];
            let outcome = model::replay(&hour, last, RATES[0].1).unwrap();
            assert!(outcome.delays_s.iter().all(|delay| *delay == 0.0), "{outcome:?}");
        }
    }

    #[test]
    fn delays_are_summed_up() {
        let delays_s = vec![0.0, 3.0, 0.5, 0.0];
        let row = Row::of(&Outcome { delays_s, harvested_gib: 7.0 }, 8.0);
        assert_eq!((row.creations, row.waited, row.median_s), (4, 2, 0.0));
        assert_eq!((row.p99_s, row.max_s, row.sum_s), (3.0, 3.0, 3.5));
        let none = Row::of(&Outcome::default(), 8.0);
        assert_eq!((none.creations, none.median_s, none.max_s), (0, 0.0, 0.0));
    }
}
