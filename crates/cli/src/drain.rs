//! `hecaton node drain`: a donor gives back all that it has lent, while its borrowers run.
//!
//! The manager has it drain; it lends nothing more, and tells each of its borrowers so with its
//! answers; they move what they have there to other donors. This command only looks on.

use crate::cluster::ClusterArgs;
use anyhow::bail;
use hecaton_memory::{Size, pages_to_bytes};
use hecaton_node::donors::DonorReport;
use serde::Serialize;
use std::io::{IsTerminal, Write as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(500);

/// Without a terminal, a line of progress now and then.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Arguments of `hecaton node drain`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The donor; that of `hecaton node` has the node's name
    name: String,
    /// Gives up waiting after so many seconds, with exit status 1; the donor goes on draining
    #[arg(long, value_name = "SECONDS", conflicts_with = "cancel")]
    deadline: Option<u64>,
    /// Has the donor lend again; what has moved stays where it is
    #[arg(long)]
    cancel: bool,
    /// Prints one JSON object at the end
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Outcome<'a> {
    donor: &'a str,
    /// Bytes in extents that borrowers still have there.
    left_bytes: u64,
    elapsed_s: f64,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let manager = args.cluster.need_manager()?;
    manager.drain(&args.name, !args.cancel)?;
    if args.cancel {
        return Ok(ExitCode::SUCCESS);
    }
    let began = Instant::now();
    let deadline = args.deadline.map(Duration::from_secs);
    let mut progress = Progress::new(args.json);
    let left_bytes = loop {
        let status = manager.status()?;
        let donors = status.nodes.iter().flat_map(|node| &node.report.donors);
        let Some(donor) = donors.into_iter().find(|donor| donor.name == args.name) else {
            bail!("the donor `{}` is gone: its node has left the cluster", args.name);
        };
        let left_bytes = lent_bytes(donor);
        match left_bytes {
            Some(0) => break 0,
            Some(left) if deadline.is_some_and(|deadline| began.elapsed() >= deadline) => {
                break left;
            }
            left => progress.show(&args.name, left, began.elapsed()),
        }
        std::thread::sleep(INTERVAL);
    };
    progress.end();
    let elapsed_s = began.elapsed().as_secs_f64();
    if args.json {
        let outcome = Outcome { donor: &args.name, left_bytes, elapsed_s };
        println!("{}", serde_json::to_string(&outcome)?);
    } else if left_bytes == 0 {
        println!(
            "{} holds nothing of anybody and can be switched off ({elapsed_s:.1} s)",
            args.name
        );
    }
    if left_bytes > 0 {
        bail!(
            "{} of others' memory are still with {}: is there room at other donors? It goes on \
             draining; `hecaton node drain {} --cancel` has it lend again",
            Size(left_bytes),
            args.name,
            args.name
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes that borrowers have there; `None` as long as it has not said that it drains.
fn lent_bytes(donor: &DonorReport) -> Option<u64> {
    let stats = donor.stats.as_ref().filter(|stats| stats.draining)?;
    Some(pages_to_bytes(stats.lent_pages + stats.leaving_pages))
}

/// How far it is, and how long it may take.
struct Progress {
    quiet: bool,
    is_terminal: bool,
    first: Option<(u64, Duration)>,
    shown: Option<Duration>,
}

impl Progress {
    fn new(quiet: bool) -> Progress {
        let is_terminal = std::io::stderr().is_terminal();
        Progress { quiet, is_terminal, first: None, shown: None }
    }

    fn show(&mut self, name: &str, left: Option<u64>, now: Duration) {
        let due = self.is_terminal || self.shown.is_none_or(|at| now >= at + LINE_INTERVAL);
        if self.quiet || !due {
            return;
        }
        self.shown = Some(now);
        let text = match left {
            None => format!("{name}: waiting for it to begin"),
            Some(left) => {
                let (before, since) = *self.first.get_or_insert((left, now));
                let left_text = Size(left);
                match estimate(before, left, now - since) {
                    Some(more) => format!("{name}: {left_text} left, {} s more", more.as_secs()),
                    None => format!("{name}: {left_text} left"),
                }
            }
        };
        match self.is_terminal {
            true => eprint!("\r{text}\x1b[K"),
            false => eprintln!("{text}"),
        }
        let _ = std::io::stderr().flush();
    }

    fn end(&self) {
        if self.is_terminal && self.shown.is_some() {
            eprint!("\r\x1b[K");
        }
    }
}

/// How long the rest takes at the rate so far.
fn estimate(before: u64, left: u64, elapsed: Duration) -> Option<Duration> {
    let moved = before.checked_sub(left).filter(|moved| *moved > 0)?;
    Some(elapsed.mul_f64(left as f64 / moved as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_takes_as_long_as_the_part_before() {
        let s = Duration::from_secs;
        assert_eq!(estimate(100, 25, s(3)), Some(s(1)));
        assert_eq!(estimate(100, 100, s(3)), None, "nothing has moved yet");
        assert_eq!(estimate(100, 150, s(3)), None, "somebody came in between");
    }
}
