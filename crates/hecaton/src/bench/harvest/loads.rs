//! Defines the guests' loads: idle, as in figure 6 of the paper, and those of its figure 7.

use super::guest::Guest;
use crate::bench::machine::program_in_guest;
use crate::bench::program::application::{PART_BYTES, Pages};
use crate::bench::world::interrupt;
use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use serde::Serialize;
use std::{
    fmt, thread,
    time::{Duration, Instant},
};

/// One of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Load {
    /// Nothing.
    Idle,
    /// The same with a kernel that does not zero what it allocates.
    IdleUnzeroed,
    /// Every processor computes, with next to no memory.
    Busy,
    /// An application has all the memory that it may have, in small pages.
    FullSmall,
    /// The same in huge pages.
    FullHuge,
}

impl Load {
    /// Groups of loads whose guests run at the same time.
    pub(super) const TOGETHER: [&[Self]; 4] =
        [&[Self::Idle, Self::IdleUnzeroed], &[Self::Busy], &[Self::FullSmall], &[Self::FullHuge]];

    /// Names the guest with this load, and its files.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::IdleUnzeroed => "idle-unzeroed",
            Self::Busy => "busy",
            Self::FullSmall => "full-small",
            Self::FullHuge => "full-huge",
        }
    }

    /// Arguments of this load for the guest's kernel.
    pub(super) const fn kernel(self) -> &'static str {
        match self {
            Self::IdleUnzeroed => "init_on_alloc=0",
            _ => "",
        }
    }

    const fn pages(self) -> Option<Pages> {
        match self {
            Self::FullSmall => Some(Pages::Small),
            Self::FullHuge => Some(Pages::Huge),
            Self::Idle | Self::IdleUnzeroed | Self::Busy => None,
        }
    }

    /// Shell script by which the manager tells an application its limit, or one that does nothing.
    pub(super) const fn hook(self) -> &'static str {
        match self.pages() {
            Some(_) => {
                "echo $HECATON_LIMIT_BYTES >/tmp/application/new
mv /tmp/application/new /tmp/application/limit
while read -r held </tmp/application/held && [ $held -gt $HECATON_LIMIT_BYTES ]; do sleep 0.02; done"
            }
            None => "exit 0",
        }
    }

    /// Starts the load in the guest.
    pub(super) fn start(self, guest: &mut Guest<'_>) -> anyhow::Result<()> {
        let program = match (self, self.pages()) {
            (_, Some(pages)) => {
                let pages = if pages == Pages::Huge { "huge" } else { "small" };
                // When memory runs out, the OOM killer must choose this process.
                format!(
                    "mkdir -p /tmp/application; echo 1000 >/proc/self/oom_score_adj; exec {} bench \
                     program application --dir /tmp/application --pages {pages}",
                    program_in_guest()
                )
            }
            (Self::Busy, _) => "exec stress-ng --cpu 2".to_owned(),
            _ => return Ok(()),
        };
        let script = format!("({program}) >/tmp/load.log 2>&1 & echo $! >/tmp/load.pid");
        guest.shell(&script).map(drop)
    }

    /// Whether the guest's OOM killer has killed the load. A load that ended otherwise is an error.
    pub(super) fn was_killed(self, guest: &mut Guest<'_>) -> anyhow::Result<bool> {
        if matches!(self, Self::Idle | Self::IdleUnzeroed) {
            return Ok(false);
        }
        let said = guest.shell(
            "kill -0 $(cat /tmp/load.pid) 2>/dev/null && exit
echo dead; dmesg -c | grep 'Out of memory'; tail -n 2 /tmp/load.log",
        )?;
        let Some(why) = said.strip_prefix("dead") else { return Ok(false) };
        ensure!(why.contains("Out of memory"), "what the guest did has ended: {}", why.trim());
        Ok(true)
    }

    /// Waits until the application, if any, holds the manager's grant: all but `reserve` bytes.
    pub(super) fn wait_full(self, guest: &mut Guest<'_>, reserve: u64) -> anyhow::Result<()> {
        if self.pages().is_none() {
            return Ok(());
        }
        let deadline = Instant::now() + FILL;
        loop {
            let said = guest.shell(
                "awk '/^MemTotal/ { print $2 }' /proc/meminfo; cat /tmp/application/held || echo 0",
            )?;
            let mut words = said.split_whitespace().map(str::parse::<u64>);
            let (total_kib, held) = match (words.next(), words.next()) {
                (Some(Ok(total_kib)), Some(Ok(held))) => (total_kib, held),
                _ => anyhow::bail!("the guest has {said:?} of memory"),
            };
            let granted = (total_kib << 10).checked_sub(reserve).context("there is no room")?;
            if held + 2 * PART_BYTES >= granted {
                return Ok(());
            }
            ensure!(
                Instant::now() < deadline,
                "the application has {} of {} MiB after {} s",
                held >> 20,
                granted >> 20,
                FILL.as_secs()
            );
            interrupt::check()?;
            thread::sleep(Duration::from_millis(200));
        }
    }
}

/// How long an application may take to fill its memory.
const FILL: Duration = Duration::from_secs(180);

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Idle => "idle",
            Self::IdleUnzeroed => "idle, init_on_alloc=0",
            Self::Busy => "CPU-bound",
            Self::FullSmall => "full, small pages",
            Self::FullHuge => "full, huge pages",
        })
    }
}
