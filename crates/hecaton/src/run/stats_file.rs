//! Writes the file that `--stats` names: what was counted while the command ran.
//!
//! The file is complete or absent: it is written beside its place and renamed. An older file is
//! removed before the command starts, so that no reader takes it for the new one. A path that is no
//! regular file (`/dev/stderr`, a pipe) is written to in place.

use super::exit;
use super::session::Outcome;
use crate::terminal::failure::usage;
use anyhow::Context as _;
use serde::Serialize;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Checked before the command runs.
pub(super) struct StatsFile {
    path: PathBuf,
    place: Place,
}

enum Place {
    /// Made by a rename.
    Regular,
    /// Open for good.
    Special(File),
}

/// Content of the file.
#[derive(Serialize)]
struct StatsReport<'a> {
    command: Vec<String>,
    /// As a shell shows it: 128 and the signal's number for a program that a signal ended.
    exit_status: u8,
    seconds: f64,
    /// Counters of the pager.
    pager: Option<&'a hecaton_pager::Stats>,
}

impl StatsFile {
    pub(super) fn create(path: &Path) -> anyhow::Result<StatsFile> {
        match prepare(path) {
            Ok(file) => Ok(file),
            Err(error) => usage!("--stats: cannot write {}: {error}", path.display()),
        }
    }

    pub(super) fn write(self, command: &[OsString], outcome: &Outcome) -> anyhow::Result<()> {
        let report = StatsReport {
            command: command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            exit_status: exit::status(outcome.status),
            seconds: outcome.seconds,
            pager: outcome.pager.as_ref().and_then(|end| end.stats.as_ref()),
        };
        let mut text = serde_json::to_vec_pretty(&report)?;
        text.push(b'\n');
        let path = self.path.display().to_string();
        self.put(&text).with_context(|| format!("cannot write {path}"))
    }

    fn put(self, text: &[u8]) -> io::Result<()> {
        if let Place::Special(mut file) = self.place {
            return file.write_all(text);
        }
        let unfinished = unfinished(&self.path);
        let written =
            fs::write(&unfinished, text).and_then(|()| fs::rename(&unfinished, &self.path));
        if written.is_err() {
            let _ = fs::remove_file(&unfinished);
        }
        written
    }
}

fn prepare(path: &Path) -> io::Result<StatsFile> {
    // A symbolic link stays, and its target is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    if let Ok(metadata) = fs::metadata(&path) {
        let file = File::options().write(true).open(&path)?;
        if !metadata.is_file() {
            return Ok(StatsFile { path, place: Place::Special(file) });
        }
    }
    // The directory takes files: this is known only by making one.
    let unfinished = unfinished(&path);
    File::create(&unfinished)?;
    fs::remove_file(&unfinished)?;
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(StatsFile { path, place: Place::Regular }),
    }
}

/// In the same directory, of this process alone.
fn unfinished(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.unfinished", std::process::id()));
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn file_is_absent_until_it_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("stats.json");
        fs::write(&path, "older").unwrap();
        let file = StatsFile::create(&path).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        file.put(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn link_stays_and_its_target_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("target"), dir.path().join("link"));
        fs::write(&target, "older").unwrap();
        symlink(&target, &link).unwrap();
        StatsFile::create(&link).unwrap().put(b"new").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&target).unwrap(), b"new");
    }

    #[test]
    fn device_is_written_to_and_not_replaced() {
        let before = fs::metadata("/dev/null").unwrap().file_type();
        StatsFile::create(Path::new("/dev/null")).unwrap().put(b"new").unwrap();
        assert_eq!(fs::metadata("/dev/null").unwrap().file_type(), before);
    }

    #[test]
    fn place_that_takes_no_file_is_refused_before_the_start() {
        let dir = tempfile::tempdir().unwrap();
        assert!(StatsFile::create(dir.path()).is_err());
        assert!(StatsFile::create(&dir.path().join("missing/stats.json")).is_err());
    }
}
