//! The program whose faults are measured: it touches random pages of memory that has two copies,
//! and tells how long that took.

use crate::bench::program::steady::{Ready, Window};
use crate::bench::world::cluster::{Cluster, PoolMemory};
use crate::bench::world::process::{Guarded, Lines, NextLine, eventually};
use anyhow::{Context as _, bail, ensure};
use hecaton_memory::{Size, pages_to_bytes};
use hecaton_pager::{PoolUse, Stats, control_socket};
use serde::de::DeserializeOwned;
use std::{
    io::{BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{ChildStdin, Stdio},
    time::{Duration, Instant},
};

/// How long an access may take before the program counts as stuck: longer than a donor is waited
/// for.
const STUCK: Duration = Duration::from_secs(90);

/// How long copies may take to be made anew.
const WHOLE: Duration = Duration::from_secs(120);

pub(super) struct Steady {
    input: ChildStdin,
    lines: Lines,
    pager: PathBuf,
    guarded: Guarded,
}

impl Steady {
    /// Starts it with so many pages, and half of that local, for which so many bytes a second are
    /// copied at most; it is filled, and all copies are there.
    pub(super) fn start(cluster: &Cluster, pages: u64, copying: Size) -> anyhow::Result<Self> {
        let pool = PoolMemory::CopiedAt(copying);
        let mut command = cluster.run_own(pages_to_bytes(pages / 2), pool, "steady");
        command.args(["--pages", &pages.to_string()]);
        let mut guarded = Guarded::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let (lines, input) = (guarded.lines()?, guarded.input()?);
        let Ready { pager } = answer(&lines)?;
        let steady = Self { input, lines, pager: control_socket(&pager), guarded };
        steady.until_whole()?;
        Ok(steady)
    }

    /// How long accesses took since this was asked last.
    pub(super) fn window(&mut self) -> anyhow::Result<Window> {
        writeln!(self.input).context("the program has ended")?;
        answer(&self.lines)
    }

    /// How the pool holds its memory, at this moment.
    pub(super) fn pool(&self) -> anyhow::Result<PoolUse> {
        ask_pager(&self.pager).context("the program's pager does not answer")
    }

    /// Waits until there are copies of everything, each where it is to be.
    pub(super) fn until_whole(&self) -> anyhow::Result<()> {
        eventually(WHOLE, || {
            let pool = self.pool()?;
            ensure!(
                pool.degraded_bytes == 0 && pool.to_move_bytes == 0,
                "{} bytes still lack a copy",
                pool.degraded_bytes
            );
            Ok(())
        })
    }

    /// It compares all of its memory, and ends.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        drop(self.input);
        self.guarded.finish()
    }
}

fn answer<T: DeserializeOwned>(lines: &Lines) -> anyhow::Result<T> {
    match lines.next_before(Instant::now() + STUCK)? {
        NextLine::Line(line) => {
            serde_json::from_str(&line).with_context(|| format!("not an answer: {line:?}"))
        }
        NextLine::End => bail!("the program has ended; its reason stands above"),
        NextLine::Late => bail!("the program has not answered for {STUCK:?}"),
    }
}

fn ask_pager(socket: &Path) -> anyhow::Result<PoolUse> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(STUCK))?;
    stream.write_all(b"\"stats\"\n")?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    let stats: Stats = serde_json::from_str(&line)?;
    Ok(stats.pool)
}
