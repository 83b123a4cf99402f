//! The ways in which a donor fails here, and how each ends.

use super::Site;
use crate::bench::world::hosts::kill;
use anyhow::Context as _;
use hecaton_netns::{Cut, Outage};
use rustix::process::Signal;
use std::time::Duration;

/// A donor of the cluster.
#[derive(Clone, Debug)]
pub(super) struct Donor {
    pub(super) name: String,
    pub(super) pid: u32,
}

/// How a donor fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// SIGKILL; its node starts it again with its memory.
    Killed,
    /// SIGSTOP: its host answers for it, and it does not.
    Stopped,
    /// Nothing reaches its host, or comes from there.
    CutOff,
}

impl Failure {
    /// How long faults may stall at most.
    pub(super) const fn aim(self) -> Duration {
        match self {
            Self::Killed => Duration::from_millis(10),
            Self::Stopped | Self::CutOff => Duration::from_millis(250),
        }
    }

    /// For how long it is looked at, and lasts where it does not end by itself.
    pub(super) const fn window(self) -> Duration {
        match self {
            Self::Killed => Duration::from_millis(500),
            Self::Stopped | Self::CutOff => Duration::from_secs(1),
        }
    }
}

/// A donor that fails at this moment; it does no longer when this is dropped.
pub(super) enum Failing<'a> {
    Killed,
    Stopped(Stopped),
    CutOff(Outage<'a>),
}

impl<'a> Failing<'a> {
    pub(super) fn begin(failure: Failure, site: &'a Site, donor: &Donor) -> anyhow::Result<Self> {
        Ok(match failure {
            Failure::Killed => {
                kill(donor.pid, Signal::KILL)?;
                Self::Killed
            }
            Failure::Stopped => {
                kill(donor.pid, Signal::STOP)?;
                Self::Stopped(Stopped(donor.pid))
            }
            Failure::CutOff => {
                let hosts = site.hosts.as_ref().context("there are no hosts to cut off")?;
                let host = hosts.host_named(&donor.name)?;
                Self::CutOff(hosts.network.cut(host, Cut::Off)?)
            }
        })
    }

    pub(super) fn end(self) -> anyhow::Result<()> {
        match self {
            Self::Killed => Ok(()),
            Self::Stopped(stopped) => {
                drop(stopped);
                Ok(())
            }
            Self::CutOff(outage) => Ok(outage.heal()?),
        }
    }
}

/// A process that is stopped.
pub(super) struct Stopped(u32);

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have been killed meanwhile, by somebody who wanted the bench to end.
        let _ = kill(self.0, Signal::CONT);
    }
}
