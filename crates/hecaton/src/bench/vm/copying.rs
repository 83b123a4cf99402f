//! Figure 7 of the Hecatonchire paper: mbw in a guest whose memory is all local, which is
//! overprovisioned and swaps to a disk, and which has a third of its memory at donors.
//!
//! Two sizes, of the same local memory. One is half as large again as what is local, as the
//! paper's: each copy moves what does not fit. The other fits: once it is warm, nothing should be
//! moved.

use super::{
    Bench,
    usage::{Totals, Usage, own_bytes},
};
use crate::bench::app::{Kind, Setup};
use crate::bench::machine::{Machine, Memory};
use crate::bench::measure::stats::Spread;
use crate::bench::program::guest::{Answer, Request};
use crate::bench::world::interrupt;
use crate::terminal::table::Table;
use anyhow::Context as _;
use serde::Serialize;
use std::time::Duration;

/// Copies in one run of mbw; the first is not counted, since it finds pages that were given up
/// since.
const COPIES: usize = 6;

/// Rounds that are not counted.
const WARM_UP: usize = 2;

/// Results of copying, as in figure 7 of the paper.
#[derive(Serialize)]
pub(super) struct Copying {
    memory_bytes: u64,
    local_bytes: u64,
    /// Memory that the hypervisor takes for itself, which the overprovisioned guest's limit has on
    /// top.
    hypervisor_bytes: u64,
    sizes: Vec<Size>,
    /// Why there is no overprovisioned guest.
    skipped: Option<String>,
}

#[derive(Serialize)]
struct Size {
    /// `fits` or `beyond`, to what is local.
    size: &'static str,
    /// Both arrays.
    bytes: u64,
    local: Speed,
    /// All local too, in a memory file of small pages, as guests with a pool have it: what the
    /// guest with remote memory loses against this, it loses to paging.
    local_in_file: Speed,
    overprovisioned: Option<Speed>,
    remote: Speed,
    /// Time for a copy against that with all memory local, medians.
    overprovisioned_ratio: Option<f64>,
    remote_ratio: f64,
    /// The same against all memory local in a file.
    remote_to_file_ratio: f64,
    /// Cost of paging for the guest with remote memory meanwhile.
    moved: Usage,
    /// Why there is nothing of the overprovisioned guest.
    failure: Option<String>,
}

#[derive(Clone, Copy, Serialize)]
struct Speed {
    mib_per_s: Spread,
    /// Standard deviation to mean.
    variation: f64,
    copies: usize,
}

impl Speed {
    fn of(speeds: &[f64]) -> Option<Self> {
        let mean = speeds.iter().sum::<f64>() / speeds.len() as f64;
        let squares = speeds.iter().map(|speed| (speed - mean).powi(2)).sum::<f64>();
        let variation = (squares / speeds.len() as f64).sqrt() / mean;
        Some(Self { mib_per_s: Spread::of(speeds)?, variation, copies: speeds.len() })
    }
}

/// Places of the guests: after the first comes the one in a file, and the last one may be missing.
const PLAIN: usize = 0;
const REMOTE: usize = 2;
const SWAPPING: usize = 3;

pub(super) fn run(bench: &Bench<'_>) -> anyhow::Result<Copying> {
    let memory = bench.memory;
    bench.say("copying: guests come up, with all memory local and with a part of it remote");
    let pool = Memory::Pool { cluster: bench.two_donors, local: memory };
    let mut machines = vec![
        bench.start("plain", memory, Memory::Plain)?,
        bench.start("file", memory, Memory::File)?,
        bench.start("remote", memory, pool)?,
    ];
    machines.iter_mut().try_for_each(Machine::wait_up)?;
    let available = machines[PLAIN].available_bytes()?;
    // Data of one and a half times the local memory still fit into the guest.
    let local = (available / 10 * 6) >> 20 << 20;
    let sizes = [("fits", local / 8 * 5), ("beyond", local / 2 * 3)];
    machines[REMOTE].resize_local(local)?;
    for (_, bytes) in sizes {
        copy(&mut machines[PLAIN], bytes, bench.limit)?;
    }
    let hypervisor = own_bytes(machines[PLAIN].own_process())?;
    let mut skipped = None;
    match overprovisioned(bench, memory, local + hypervisor) {
        Ok(machine) => machines.push(machine),
        Err(error) => {
            interrupt::check()?;
            skipped = Some(format!("{error:#}"));
        }
    }
    let mut measured = Vec::new();
    for (size, bytes) in sizes {
        bench.say(&format!(
            "copying: {} MiB, {} {} MiB local",
            bytes >> 20,
            if size == "fits" { "which fit into" } else { "which do not fit into" },
            local >> 20
        ));
        measured.push(measure(bench, &mut machines, size, bytes)?);
    }
    Ok(Copying {
        memory_bytes: memory,
        local_bytes: local,
        hypervisor_bytes: hypervisor,
        sizes: measured,
        skipped,
    })
}

fn measure(
    bench: &Bench<'_>,
    machines: &mut Vec<Machine<'_>>,
    size: &'static str,
    bytes: u64,
) -> anyhow::Result<Size> {
    let mut speeds: [Vec<f64>; 4] = Default::default();
    let mut failure = None;
    let mut moved = Usage::default();
    // Before the rounds that are measured come some until what is used is where it is used.
    for round in 0..WARM_UP + bench.rounds {
        let count = machines.len();
        for turn in 0..count {
            let which = (turn + round) % count;
            if which == SWAPPING && failure.is_some() {
                continue;
            }
            let counts = which == REMOTE && round >= WARM_UP;
            let totals = || Totals::now(bench.two_donors, "remote");
            let before = counts.then(totals).transpose()?;
            let copied = copy(&mut machines[which], bytes, bench.limit);
            let copied = match copied {
                // That is part of the result.
                Err(error) if which == SWAPPING => {
                    interrupt::check()?;
                    failure = Some(format!("{error:#}"));
                    continue;
                }
                copied => copied?,
            };
            if let Some(before) = before {
                moved = moved + totals()?.since(&before);
            }
            if round >= WARM_UP {
                speeds[which].extend(copied);
            }
        }
    }
    if failure.is_some() {
        // It may still be busy with what it was not done with.
        machines.truncate(SWAPPING);
        speeds[SWAPPING].clear();
    }
    let [local, local_in_file, remote, overprovisioned] = speeds.map(|of| Speed::of(&of));
    let (local, remote) = (local.context("no copy")?, remote.context("no copy")?);
    let local_in_file = local_in_file.context("no copy")?;
    let ratio = |of: Speed, to: Speed| to.mib_per_s.median / of.mib_per_s.median;
    Ok(Size {
        size,
        bytes,
        overprovisioned_ratio: overprovisioned.map(|of| ratio(of, local)),
        remote_ratio: ratio(remote, local),
        remote_to_file_ratio: ratio(remote, local_in_file),
        local,
        local_in_file,
        overprovisioned,
        remote,
        moved,
        failure,
    })
}

fn overprovisioned<'a>(bench: &Bench<'a>, memory: u64, limit: u64) -> anyhow::Result<Machine<'a>> {
    let setup = Setup::limited(Kind::Disk, limit, memory * 2, bench.dir)?;
    let mut machine = bench.start("swapping", memory, Memory::Limited(Box::new(setup)))?;
    machine.wait_up()?;
    Ok(machine)
}

/// The speed of each copy in MiB/s, but of the first.
fn copy(machine: &mut Machine<'_>, bytes: u64, limit: Duration) -> anyhow::Result<Vec<f64>> {
    let array = (bytes >> 21).max(1);
    let script = format!("mbw -q -t 0 -n {COPIES} {array}");
    let answer = machine.try_ask(&Request::Shell(script), limit)?;
    match answer {
        Some(Answer::Said(text)) => {
            let speeds = speeds(&text);
            anyhow::ensure!(speeds.len() == COPIES, "mbw says {text:?}");
            Ok(speeds[1..].to_vec())
        }
        Some(other) => anyhow::bail!("the guest `{}` answers {other:?}", machine.name),
        None => anyhow::bail!(
            "{COPIES} copies of {array} MiB take the guest `{}` more than {} s",
            machine.name,
            limit.as_secs()
        ),
    }
}

/// `0  Method: MEMCPY  Elapsed: 0.10  MiB: 100.0  Copy: 1000.0 MiB/s`, and the average at the end.
fn speeds(text: &str) -> Vec<f64> {
    let lines = text.lines().filter(|line| !line.starts_with("AVG"));
    let speed = |line: &str| {
        let (_, rest) = line.split_once("Copy:")?;
        rest.split_whitespace().next()?.parse().ok()
    };
    lines.filter_map(speed).collect()
}

pub(super) fn show(copying: &Copying) {
    println!(
        "mbw in a guest of {} MiB, {} MiB of it local where it is not all",
        copying.memory_bytes >> 20,
        copying.local_bytes >> 20
    );
    for size in &copying.sizes {
        let relation = if size.size == "fits" { "fits into" } else { "is more than" };
        println!("\n{} MiB, which {relation} what is local", size.bytes >> 20);
        let heading = ["MiB/s", "median", "least", "most", "variation", "times as long"];
        let mut table = Table::figures(heading);
        let mut row = |name: &str, speed: &Speed, ratio: f64| {
            let Spread { median, min, max } = speed.mib_per_s;
            let [median, min, max] = [median, min, max].map(|value| format!("{value:.0}"));
            let variation = format!("{:.1} %", speed.variation * 100.0);
            table.row([name.to_owned(), median, min, max, variation, format!("{ratio:.2} ×")]);
        };
        row("all memory local", &size.local, 1.0);
        let to_local = size.local.mib_per_s.median / size.local_in_file.mib_per_s.median;
        row("all memory local, in a file", &size.local_in_file, to_local);
        row("remote beyond the local memory", &size.remote, size.remote_ratio);
        if let (Some(speed), Some(ratio)) = (&size.overprovisioned, size.overprovisioned_ratio) {
            row("overprovisioned, disk swap", speed, ratio);
        }
        print!("{table}");
        if let Some(failure) = &size.failure {
            println!("  overprovisioned: {failure}");
        }
        println!("  {}", size.moved);
    }
    if let Some(reason) = &copying.skipped {
        println!("  overprovisioned: skipped: {reason}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_mbw_are_understood() {
        let said = "0\tMethod: MEMCPY\tElapsed: 0.02\tMiB: 64.00000\tCopy: 2650.213 MiB/s\n\
                    1\tMethod: MEMCPY\tElapsed: 0.02\tMiB: 64.00000\tCopy: 2641.000 MiB/s\n\
                    AVG\tMethod: MEMCPY\tElapsed: 0.02\tMiB: 64.00000\tCopy: 2645.6 MiB/s\n";
        assert_eq!(speeds(said), [2650.213, 2641.0]);
    }

    #[test]
    fn variation_is_the_deviation_to_the_mean() {
        let speed = Speed::of(&[90.0, 110.0]).unwrap();
        assert!((speed.variation - 0.1).abs() < 1e-9);
        assert!(Speed::of(&[5.0, 5.0, 5.0]).unwrap().variation.abs() < 1e-9);
        assert!(Speed::of(&[]).is_none());
    }
}
