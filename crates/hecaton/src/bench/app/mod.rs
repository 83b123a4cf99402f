//! `bench app`: real programs with less and less local memory.
//!
//! A program first runs with all of its memory local; what it then had resident at most is its
//! 100 %. Every other run is a slowdown against the median of those runs. Within a round all
//! methods take their turn at one program and one limit before the next, each round beginning with
//! another one.

mod program;
mod redis;
mod setup;
mod swap;

pub(super) use setup::Setup;
pub(super) use swap::Kind;

use super::Common;
use crate::bench::measure::stats::Spread;
use crate::bench::world::cluster::{Cluster, PoolMemory};
use crate::bench::world::interrupt;
use crate::terminal::table::Table;
use anyhow::{Context as _, ensure};
use hecaton_memory::Size;
use program::{Finished, Outcome, Program};
use serde::Serialize;
use setup::Method;
use std::{collections::BTreeMap, path::Path, time::Duration};

/// Arguments of `bench app`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Memory that each program uses, roughly.
    #[arg(long, default_value = "1G")]
    size: Size,
    /// How often everything is measured; the medians are reported.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Percentages of a program's memory that may be local.
    #[arg(long, value_delimiter = ',', default_value = "75,50,25", value_parser = clap::value_parser!(u8).range(5..=95))]
    local: Vec<u8>,
    /// Only these programs: mbw, sort, redis, quicksort, and quicksorts-1, -2, -4 and -8, so many
    /// at a time, each of an eighth of the memory.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these methods: hecaton, hecaton-mirror, hecaton-swap, disk, zram, nbdkit.
    #[arg(long, value_delimiter = ',')]
    methods: Vec<String>,
    /// Seconds after which a run is given up.
    #[arg(long, default_value_t = 600)]
    limit_s: u64,
    #[command(flatten)]
    common: Common,
}

#[derive(Serialize)]
struct Report {
    rounds: usize,
    programs: Vec<ProgramReport>,
    skipped: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct ProgramReport {
    program: &'static str,
    /// The largest resident memory with nothing limiting it: the 100 %.
    memory_bytes: u64,
    all_local_s: Spread,
    /// Jain's index of the times of several processes, 1 if all take equally long; `None` for a
    /// single process.
    all_local_fairness: Option<Spread>,
    runs: Vec<RunReport>,
}

#[derive(Serialize)]
struct RunReport {
    method: &'static str,
    local_percent: u8,
    local_bytes: u64,
    elapsed_s: Option<Spread>,
    /// Median time to the median time with all memory local.
    slowdown: Option<f64>,
    /// Jain's index of the times of several processes.
    fairness: Option<Spread>,
    /// Memory that the swap device itself took of this host, beyond the program's limit.
    device_local_bytes: Option<u64>,
    /// How often the kernel's out-of-memory killer ended a run, which was then tried again.
    oom_kills: u32,
    /// Why there is no time: too slow, failed.
    failure: Option<String>,
}

/// Attempts at a run that the out-of-memory killer ends. A memory cgroup under a storm of swapping
/// sometimes finds nothing to reclaim though the swap device is half empty.
const ATTEMPTS: u32 = 4;

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    let size = if common.quick { args.size.0.min(192 << 20) } else { args.size.0 };
    let rounds = if common.quick { 1 } else { args.rounds };
    ensure!(rounds > 0, "--rounds 0 would measure nothing");
    let methods = chosen("--methods", &args.methods, &Method::ALL, |method| match method {
        Method::Hecaton => "hecaton",
        Method::HecatonMirrored => "hecaton-mirror",
        Method::HecatonSwap => "hecaton-swap",
        Method::Swap(Kind::Disk) => "disk",
        Method::Swap(Kind::Zram) => "zram",
        Method::Swap(Kind::Nbdkit) => "nbdkit",
    })?;

    let scratch = common.scratch()?;
    let cluster = Cluster::find_or_start(common.manager.as_deref(), size * 3, scratch.path());
    let swap = setup::check_swap().map_err(|error| format!("{error:#}"));
    let mut skipped = BTreeMap::new();
    let mut reports = Vec::new();
    let names = chosen("--only", &args.only, &program::NAMES, |name| name)?;
    for name in names {
        common.say(&format!("{name}: preparing"));
        let program = match program::prepare(name, size, scratch.path()) {
            Ok(program) => program,
            Err(error) => {
                interrupt::check()?;
                skipped.insert(name.to_owned(), format!("{error:#}"));
                continue;
            }
        };
        let bench = AppBench {
            program: &*program,
            methods: &methods,
            percents: &args.local,
            rounds,
            limit: Duration::from_secs(args.limit_s),
            cluster: cluster.as_ref(),
            swap: swap.as_ref().map(drop).map_err(String::as_str),
            dir: scratch.path(),
            common,
        };
        reports.push(bench.run(&mut skipped)?);
    }
    let report = Report { rounds, programs: reports, skipped };
    if common.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        show(&report, &methods);
    }
    Ok(())
}

/// Those of `all` that are named, all of them if none is.
fn chosen<T: Copy>(
    option: &str,
    names: &[String],
    all: &[T],
    name_of: impl Fn(T) -> &'static str,
) -> anyhow::Result<Vec<T>> {
    if names.is_empty() {
        return Ok(all.to_vec());
    }
    let find = |name: &String| {
        let found = all.iter().copied().find(|one| name_of(*one) == name);
        found.with_context(|| {
            let known: Vec<_> = all.iter().map(|one| name_of(*one)).collect();
            format!("{option} {name}: known are {}", known.join(", "))
        })
    };
    names.iter().map(find).collect()
}

struct AppBench<'a> {
    program: &'a dyn Program,
    methods: &'a [Method],
    percents: &'a [u8],
    rounds: usize,
    limit: Duration,
    cluster: Result<&'a Cluster, &'a anyhow::Error>,
    /// Why nothing can be swapped here, if that is so.
    swap: Result<(), &'a str>,
    dir: &'a Path,
    common: &'a Common,
}

/// Results so far of one method's rounds at one limit.
#[derive(Default)]
struct Series {
    seconds: Vec<f64>,
    fairness: Vec<f64>,
    device_local_bytes: Option<u64>,
    oom_kills: u32,
    failure: Option<String>,
    skipped: bool,
}

impl AppBench<'_> {
    fn run(&self, skipped: &mut BTreeMap<String, String>) -> anyhow::Result<ProgramReport> {
        let (mut local_s, mut local_fairness) = (Vec::new(), Vec::new());
        let mut memory_bytes = 0;
        let mut series: BTreeMap<(usize, usize), Series> = BTreeMap::new();
        for round in 0..self.rounds {
            let finished = self.all_local()?;
            local_s.push(finished.elapsed.as_secs_f64());
            local_fairness.extend(finished.fairness);
            if round == 0 {
                memory_bytes = finished.peak_bytes;
            }
            for (at, percent) in self.percents.iter().enumerate() {
                for turn in 0..self.methods.len() {
                    let method = (turn + round) % self.methods.len();
                    let series = series.entry((at, method)).or_default();
                    if series.failure.is_none() && !series.skipped {
                        let local = memory_bytes / 100 * u64::from(*percent);
                        self.measure(self.methods[method], local, memory_bytes, series, skipped)?;
                    }
                }
            }
        }
        let all_local_s = Spread::of(&local_s).context("there is no round")?;
        let runs = series
            .into_iter()
            .filter(|(_, series)| !series.skipped)
            .map(|((at, method), series)| {
                // A method that failed once has no median: the rounds that went well are the
                // lucky ones.
                let elapsed_s =
                    if series.failure.is_none() { Spread::of(&series.seconds) } else { None };
                let fairness = elapsed_s.and_then(|_| Spread::of(&series.fairness));
                RunReport {
                    method: self.methods[method].name(),
                    local_percent: self.percents[at],
                    local_bytes: memory_bytes / 100 * u64::from(self.percents[at]),
                    slowdown: elapsed_s.map(|elapsed| elapsed.median / all_local_s.median),
                    elapsed_s,
                    fairness,
                    device_local_bytes: series.device_local_bytes,
                    oom_kills: series.oom_kills,
                    failure: series.failure,
                }
            })
            .collect();
        let (program, all_local_fairness) = (self.program.name(), Spread::of(&local_fairness));
        Ok(ProgramReport { program, memory_bytes, all_local_s, all_local_fairness, runs })
    }

    fn all_local(&self) -> anyhow::Result<Finished> {
        self.common.say(&format!("{}: all memory local", self.program.name()));
        match self.program.run(&Setup::Local, self.limit)? {
            Outcome::Finished(finished) => Ok(finished),
            Outcome::OutOfMemory => {
                anyhow::bail!("{} was killed with all memory local", self.program.name())
            }
            Outcome::TooSlow => anyhow::bail!(
                "{} takes more than {} s even with all memory local: use a smaller --size",
                self.program.name(),
                self.limit.as_secs()
            ),
        }
    }

    fn set_up(&self, method: Method, local: u64, all: u64) -> anyhow::Result<Setup<'_>> {
        let cluster = || self.cluster.map_err(|error| anyhow::anyhow!("{error:#}"));
        if matches!(method, Method::HecatonSwap | Method::Swap(_)) {
            self.swap.map_err(|reason| anyhow::anyhow!("{reason}"))?;
            setup::wait_for_no_swap()?;
        }
        let paged = |pool| Ok(Setup::Hecaton { cluster: cluster()?, local, pool });
        match method {
            Method::Hecaton => paged(PoolMemory::Plain),
            Method::HecatonMirrored => paged(PoolMemory::Copies(2)),
            Method::HecatonSwap => {
                Ok(Setup::HecatonSwap { cluster: cluster()?, local, swap: all * 2 })
            }
            Method::Swap(kind) => Setup::limited(kind, local, all * 2, self.dir),
        }
    }

    /// One run. Only being stopped is an error: all else is part of the result.
    fn measure(
        &self,
        method: Method,
        local: u64,
        all: u64,
        series: &mut Series,
        skipped: &mut BTreeMap<String, String>,
    ) -> anyhow::Result<()> {
        let name = self.program.name();
        self.common.say(&format!(
            "{name}: {} of {} local, {}",
            in_mebibytes(local),
            in_mebibytes(all),
            method.name()
        ));
        for attempt in 1..=ATTEMPTS {
            let setup = match self.set_up(method, local, all) {
                Ok(setup) => setup,
                Err(error) => {
                    interrupt::check()?;
                    series.skipped = true;
                    skipped.insert(method.name().to_owned(), format!("{error:#}"));
                    return Ok(());
                }
            };
            let outcome = self.program.run(&setup, self.limit);
            series.device_local_bytes = series.device_local_bytes.max(setup.own_local_bytes());
            match outcome {
                Ok(Outcome::Finished(finished)) => {
                    series.seconds.push(finished.elapsed.as_secs_f64());
                    series.fairness.extend(finished.fairness);
                }
                Ok(Outcome::OutOfMemory) => {
                    series.oom_kills += 1;
                    if attempt < ATTEMPTS {
                        continue;
                    }
                    series.failure =
                        Some(format!("killed for want of memory {ATTEMPTS} times in a row"));
                }
                Ok(Outcome::TooSlow) => {
                    series.failure = Some(format!("more than {} s", self.limit.as_secs()));
                }
                Err(error) => {
                    interrupt::check()?;
                    series.failure = Some(format!("{error:#}"));
                }
            }
            break;
        }
        Ok(())
    }
}

/// Whole mebibytes, for people.
const fn in_mebibytes(bytes: u64) -> Size {
    Size(bytes >> 20 << 20)
}

fn show(report: &Report, methods: &[Method]) {
    println!(
        "Slowdown against all memory local; medians of {} rounds, least and most",
        report.rounds
    );
    for program in &report.programs {
        println!(
            "\n{}: {} of memory, {:.2} s with all of it local{}",
            program.program,
            in_mebibytes(program.memory_bytes),
            program.all_local_s.median,
            shares(program.all_local_fairness)
        );
        let mut percents: Vec<_> = program.runs.iter().map(|run| run.local_percent).collect();
        percents.sort_unstable_by(|a, b| b.cmp(a));
        percents.dedup();
        let heading = percents.iter().map(|percent| format!("{percent} %"));
        let mut table = Table::figures(std::iter::once("local".to_owned()).chain(heading));
        for method in methods.iter().map(|method| method.name()) {
            let cells: Vec<_> = percents
                .iter()
                .map(|percent| {
                    let run = program
                        .runs
                        .iter()
                        .find(|run| run.method == method && run.local_percent == *percent);
                    run.map_or_else(String::new, |run| cell(run, program.all_local_s.median))
                })
                .collect();
            if cells.iter().any(|cell| !cell.is_empty()) {
                table.row(std::iter::once(method.to_owned()).chain(cells));
            }
        }
        print!("{table}");
        for run in &program.runs {
            if let Some(failure) = &run.failure {
                println!("  {} at {} %: {failure}", run.method, run.local_percent);
            }
            if run.oom_kills > 0 {
                println!(
                    "  {} at {} %: the kernel's out-of-memory killer ended {} runs",
                    run.method, run.local_percent, run.oom_kills
                );
            }
            if let Some(bytes) = run.device_local_bytes {
                println!(
                    "  {} at {} % took {} of this host's memory for itself, beyond the limit",
                    run.method,
                    run.local_percent,
                    in_mebibytes(bytes)
                );
            }
        }
    }
    if !report.skipped.is_empty() {
        println!("\nSkipped:");
        for (what, why) in &report.skipped {
            println!("  {what}: {why}");
        }
    }
}

fn cell(run: &RunReport, all_local_s: f64) -> String {
    match (&run.elapsed_s, run.slowdown) {
        (Some(elapsed), Some(slowdown)) => format!(
            "{slowdown:.2} × ({:.2}–{:.2}){}",
            elapsed.min / all_local_s,
            elapsed.max / all_local_s,
            shares(run.fairness)
        ),
        _ => "—".to_owned(),
    }
}

/// How fair the shares of several processes were.
fn shares(fairness: Option<Spread>) -> String {
    fairness.map_or_else(String::new, |fairness| format!(", shares {:.3}", fairness.median))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_is_named_with_what_is() {
        let all = ["mbw", "sort"];
        assert_eq!(chosen("--only", &[], &all, |name| name).unwrap(), all);
        assert_eq!(chosen("--only", &["sort".into()], &all, |name| name).unwrap(), ["sort"]);
        let error = chosen("--only", &["sotr".into()], &all, |name| name).unwrap_err();
        assert_eq!(error.to_string(), "--only sotr: known are mbw, sort");
    }
}
