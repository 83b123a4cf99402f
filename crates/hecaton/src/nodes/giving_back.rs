//! Looks on while the borrowers of a donor take away what it is to have back. How far they are
//! stands on standard error: in one line that changes on a terminal, in a line now and then
//! elsewhere.

use crate::cluster::{ClusterArgs, Manager};
use anyhow::bail;
use hecaton_donor::ParkSnapshot;
use hecaton_memory::{Size, pages_to_bytes};
use hecaton_node::donors::DonorReport;
use serde::Serialize;
use std::io::{IsTerminal, Write as _};
use std::time::{Duration, Instant};

/// Time between two looks.
const INTERVAL: Duration = Duration::from_millis(500);

/// A manager that is busy or started again answers within this time.
const AWAY_PATIENCE: Duration = Duration::from_secs(60);

/// Without a terminal, a line now and then.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// The donor to watch, and the time and form in which its progress is shown.
#[derive(clap::Args)]
pub(crate) struct WatchArgs {
    /// The donor; that of `hecaton node` has the node's name
    pub(crate) name: String,
    /// Gives up waiting after so many seconds, with exit status 1; the donor goes on with it
    #[arg(long, value_name = "SECONDS", conflicts_with = "cancel")]
    deadline: Option<u64>,
    /// Prints one JSON object at the end
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
}

/// JSON object that `--json` prints.
#[derive(Serialize)]
pub(crate) struct Outcome<'a> {
    pub(crate) donor: &'a str,
    /// Bytes that borrowers still are to take away.
    pub(crate) left_bytes: u64,
    /// Bytes that the donor has in its file instead of in memory.
    pub(crate) parked_bytes: u64,
    /// Why the donor parks nothing more, if it should and cannot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) trouble: Option<String>,
    pub(crate) elapsed_s: f64,
}

/// Waits until nothing is left, or till the deadline. `left` says how many bytes a donor is still
/// to have back; `None` as long as it has not said that it was told.
pub(crate) fn watch<'a>(
    manager: &Manager,
    args: &'a WatchArgs,
    left: impl Fn(&DonorReport) -> Option<u64>,
) -> anyhow::Result<Outcome<'a>> {
    let (began, donor) = (Instant::now(), args.name.as_str());
    let deadline = args.deadline.map(Duration::from_secs);
    let mut progress = Progress::new(args.json);
    let mut away_since = None;
    let (left_bytes, park) = loop {
        let status = match manager.status() {
            Ok(status) => status,
            // The donor and its borrowers go on without a manager.
            Err(_) if away_since.get_or_insert_with(Instant::now).elapsed() < AWAY_PATIENCE => {
                std::thread::sleep(INTERVAL);
                continue;
            }
            Err(error) => return Err(error),
        };
        away_since = None;
        let mut donors = status.nodes.iter().flat_map(|node| &node.report.donors);
        let Some(report) = donors.find(|known| known.name == donor) else {
            bail!("the donor `{donor}` is gone: its node has left the cluster");
        };
        let park = report.stats.as_ref().and_then(|stats| stats.park.as_ref());
        match left(report) {
            Some(0) => break (0, park.cloned()),
            Some(left) if deadline.is_some_and(|deadline| began.elapsed() >= deadline) => {
                break (left, park.cloned());
            }
            left => progress.show(donor, left, park, began.elapsed()),
        }
        std::thread::sleep(INTERVAL);
    };
    progress.end();
    let (parked_bytes, trouble) = match park {
        Some(park) => (pages_to_bytes(park.parked_pages), park.trouble),
        None => (0, None),
    };
    Ok(Outcome {
        donor,
        left_bytes,
        parked_bytes,
        trouble,
        elapsed_s: began.elapsed().as_secs_f64(),
    })
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

    fn show(&mut self, name: &str, left: Option<u64>, park: Option<&ParkSnapshot>, now: Duration) {
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
        let text = match park.and_then(|park| park.trouble.as_ref()) {
            Some(trouble) => format!("{text}; it cannot be parked: {trouble}"),
            None => text,
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
