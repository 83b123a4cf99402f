//! Several quicksorts at a time, each in a process of its own (MemX, figure 7), and how long each
//! took: those that share a client's memory are to have fair shares of it.

use super::quicksort;
use crate::bench::world::cluster::this_program;
use crate::bench::world::process::describe;
use anyhow::{Context as _, bail};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Instant;

/// Arguments of `quicksorts`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many 64-bit integers each sorts.
    #[arg(long)]
    count: usize,
    /// How many processes.
    #[arg(long)]
    processes: usize,
}

/// Time of each process, and the sum of their largest resident memory.
#[derive(Serialize, Deserialize)]
pub(in crate::bench) struct Report {
    pub(in crate::bench) elapsed_s: Vec<f64>,
    pub(in crate::bench) peak_bytes: u64,
}

/// One that has ended.
struct Ended {
    elapsed_s: f64,
    output: std::process::Output,
}

pub(super) fn run(args: &Args) -> anyhow::Result<Report> {
    let program = this_program()?;
    let start = |_| {
        Command::new(&program)
            .args(["bench", "program", "quicksort", "--count", &args.count.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a quicksort")
    };
    let begun = Instant::now();
    let children = (0..args.processes).map(start).collect::<anyhow::Result<Vec<_>>>()?;
    let wait = |child: Child| -> anyhow::Result<Ended> {
        let output = child.wait_with_output()?;
        Ok(Ended { elapsed_s: begun.elapsed().as_secs_f64(), output })
    };
    let ended = thread::scope(|scope| {
        let waits: Vec<_> =
            children.into_iter().map(|child| scope.spawn(move || wait(child))).collect();
        let ended = waits.into_iter().map(|wait| wait.join().expect("waiting does not panic"));
        ended.collect::<anyhow::Result<Vec<_>>>()
    })?;
    // The bench sees only how this process ends, and must learn of the kill.
    if ended.iter().any(|one| one.output.status.signal() == Some(Signal::KILL.as_raw())) {
        kill_process(getpid(), Signal::KILL)?;
    }
    let mut report = Report { elapsed_s: Vec::new(), peak_bytes: 0 };
    for Ended { elapsed_s, output } in ended {
        if !output.status.success() {
            bail!("a quicksort {}", describe(output.status));
        }
        let one: quicksort::Report = serde_json::from_slice(&output.stdout)?;
        report.elapsed_s.push(elapsed_s);
        report.peak_bytes += one.peak_bytes;
    }
    Ok(report)
}
