//! The file that `--stats` names: what was counted while the command ran.

use super::exit;
use super::session::Outcome;
use crate::failure::usage;
use anyhow::Context as _;
use serde::Serialize;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Made before the command runs.
pub(super) struct StatsFile {
    path: PathBuf,
    file: File,
}

/// What is written to it.
#[derive(Serialize)]
struct StatsReport<'a> {
    command: Vec<String>,
    /// As a shell shows it: 128 and the signal's number for a program that a signal ended.
    exit_status: u8,
    seconds: f64,
    /// What the pager counted.
    pager: Option<&'a hecaton_pager::Stats>,
}

impl StatsFile {
    pub(super) fn create(path: &Path) -> anyhow::Result<StatsFile> {
        match File::create(path) {
            Ok(file) => Ok(StatsFile { path: path.to_owned(), file }),
            Err(error) => usage!("--stats: cannot write {}: {error}", path.display()),
        }
    }

    pub(super) fn write(mut self, command: &[OsString], outcome: &Outcome) -> anyhow::Result<()> {
        let report = StatsReport {
            command: command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            exit_status: exit::status(outcome.status),
            seconds: outcome.seconds,
            pager: outcome.pager.as_ref().and_then(|end| end.stats.as_ref()),
        };
        let mut text = serde_json::to_vec_pretty(&report)?;
        text.push(b'\n');
        self.file.write_all(&text).with_context(|| format!("cannot write {}", self.path.display()))
    }
}
