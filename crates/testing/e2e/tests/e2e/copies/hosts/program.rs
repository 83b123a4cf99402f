//! A program on the pool that verifies what it reads, while hosts fail.

use crate::harness::{
    cluster::{Cluster, LONG, all},
    process::Running,
};
use anyhow::{Context as _, bail, ensure};
use serde_json::Value;
use std::{io::Read as _, process::ChildStdout};

/// A program on the pool.
pub(super) struct Program {
    pub(super) running: Running,
    pub(super) output: ChildStdout,
    pub(super) name: String,
}

impl Program {
    /// Statistics of the program's pager; null while the status has none.
    pub(super) fn stats<'a>(&self, status: &'a Value) -> &'a Value {
        let mine = all(status, "consumers").find(|one| one["name"] == *self.name);
        mine.map_or(&Value::Null, |one| &one["stats"])
    }

    /// How the pool holds its memory; null while that is not known.
    pub(super) fn pool<'a>(&self, status: &'a Value) -> &'a Value {
        &self.stats(status)["pool"]
    }

    pub(super) fn pager(&self, cluster: &Cluster) -> anyhow::Result<u32> {
        let status = cluster.status()?;
        let mine = all(&status, "consumers").find(|one| one["name"] == *self.name);
        let pid = mine.and_then(|one| one["pid"].as_u64());
        Ok(u32::try_from(pid.context("the program has no pager")?)?)
    }

    pub(super) fn expect_running(&mut self) -> anyhow::Result<()> {
        let Some(status) = self.running.child_mut().try_wait()? else { return Ok(()) };
        let complaint = self.complaint()?;
        bail!("{} has ended with {status}: {complaint}", self.name)
    }

    /// It was still running, and all that it reads last is as it was written.
    pub(super) fn has_verified(mut self, cluster: &Cluster) -> anyhow::Result<()> {
        self.expect_running()?;
        drop(self.running.child_mut().stdin.take());
        let status = self.running.wait(LONG, || Ok(()))?;
        let mut said = String::new();
        self.output.read_to_string(&mut said)?;
        ensure!(
            status.success() && said.starts_with("verified"),
            "it ended with {status} and said {said:?} and {:?}\n    {}",
            self.complaint()?,
            cluster.log_tail()
        );
        Ok(())
    }

    /// Pages that so many donors, without `except`, have lent to it; `None` if one is not heard.
    pub(super) fn lent_by(&self, count: usize, except: &str, status: &Value) -> Option<u64> {
        let others: Vec<_> = all(status, "donors").filter(|one| one["name"] != except).collect();
        let lent = others.iter().map(|donor| {
            let spaces = donor["stats"]["spaces"].as_array()?.iter();
            let its = spaces.filter(|space| space["consumer"] == *self.name);
            Some(its.filter_map(|space| space["pages"].as_u64()).sum::<u64>())
        });
        (others.len() == count).then(|| lent.sum())?
    }

    /// It ends by itself, for one of these reasons, without having seen a wrong byte: it would have
    /// ended with another status, and said so.
    pub(super) fn was_ended_because(mut self, reasons: &[&str]) -> anyhow::Result<()> {
        let status = self.running.wait(LONG, || Ok(()))?;
        let (mut said, complaint) = (String::new(), self.complaint()?);
        self.output.read_to_string(&mut said)?;
        ensure!(status.code() == Some(137) && said.is_empty(), "{status}: {said:?}, {complaint:?}");
        let has_segment = complaint.contains("segment ") && complaint.contains(" of space ");
        let has_reason = reasons.iter().any(|reason| complaint.contains(reason));
        ensure!(has_segment && has_reason, "the reason is not told: {complaint:?}");
        Ok(())
    }

    /// Standard error of the program and of `hecaton run`. Both must have ended.
    fn complaint(&mut self) -> anyhow::Result<String> {
        let mut complaint = String::new();
        if let Some(mut stderr) = self.running.child_mut().stderr.take() {
            stderr.read_to_string(&mut complaint)?;
        }
        Ok(complaint)
    }
}
