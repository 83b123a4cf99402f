//! A Java virtual machine: a hint to its heap, by `jcmd`.
//!
//! `SoftMaxHeapSize` is the one size of the heap that can be changed while it runs. It is a hint:
//! ZGC and Shenandoah keep the heap below it as long as they can, G1 does so in late versions only.
//! So a full collection is asked for too when the heap is to shrink, after which all of them give
//! memory back. How much is left is not asked: the order has settled when the collection has ended.

use super::program::run;
use super::{Ending, Progress, Sink, SinkError};
use crate::governor::{Order, Reason};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// How long one `jcmd` may take: a full collection of a large heap takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// One virtual machine.
pub(crate) struct Jvm {
    /// A file with the number of its process.
    pub(crate) pid_file: PathBuf,
    /// The program by which it is told.
    pub(crate) jcmd: PathBuf,
    pub(crate) ending: Ending,
    /// The process that was told last.
    pub(crate) told: Option<u32>,
}

impl Jvm {
    fn pid(&self) -> Result<u32, SinkError> {
        let path = || self.pid_file.clone();
        let text = fs::read_to_string(&self.pid_file)
            .map_err(|source| SinkError::Read { path: path(), source })?;
        let text = text.trim();
        text.parse().map_err(|_| SinkError::NoPid { path: path(), text: text.to_owned() })
    }

    fn jcmd(&self, pid: u32, words: &[&str]) -> Result<String, SinkError> {
        let mut command = Command::new(&self.jcmd);
        run(command.arg(pid.to_string()).args(words), PATIENCE, &self.ending)
    }

    fn hint(&mut self, pid: u32, limit_bytes: u64) -> Result<(), SinkError> {
        let limit = limit_bytes.to_string();
        let said = self.jcmd(pid, &["VM.set_flag", "SoftMaxHeapSize", &limit])?;
        // A refusal is a word of it, and no status.
        match said.lines().find(|line| line.contains("error")) {
            None => {
                self.told = Some(pid);
                Ok(())
            }
            Some(line) => Err(SinkError::Failed {
                program: format!("jcmd {pid} VM.set_flag SoftMaxHeapSize {limit}"),
                how: format!(
                    "was refused: {line}; the heap's limit is -Xmx: max is not to be above it"
                ),
            }),
        }
    }
}

impl Sink for Jvm {
    fn tell(&mut self, order: &Order) -> Result<Progress, SinkError> {
        let pid = self.pid()?;
        self.hint(pid, order.limit_bytes)?;
        if order.reason == Reason::Shrink {
            self.jcmd(pid, &["GC.run"])?;
        }
        Ok(Progress::Settled)
    }

    fn keep(&mut self, order: &Order) -> Result<(), SinkError> {
        let pid = self.pid()?;
        match self.told == Some(pid) {
            true => Ok(()),
            false => self.hint(pid, order.limit_bytes),
        }
    }
}
