//! Notes which disk has the file system, for the next keeper.

use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A volume as a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Disk {
    /// A block device of the ublk driver.
    BlockDevice(PathBuf),
    /// A file, on which a loop device is made.
    File(PathBuf),
}

/// The path of the note of this record.
pub(super) fn path(record: &Path) -> PathBuf {
    let mut path = record.as_os_str().to_owned();
    path.push(".note");
    path.into()
}

/// The disk. `None` if there is no whole file system yet.
pub(super) fn read(note: &Path) -> io::Result<Option<Disk>> {
    match fs::read(note) {
        Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Notes the disk, after its file system was made.
pub(super) fn write(note: &Path, disk: &Disk) -> io::Result<()> {
    let unfinished = note.with_extension("note-new");
    fs::write(&unfinished, serde_json::to_vec(disk)?)?;
    fs::rename(&unfinished, note)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_keeper_finds_the_disk() {
        let dir = tempfile::tempdir().unwrap();
        let note = path(&dir.path().join("pager-1.sock.files.record"));
        assert_eq!(read(&note).unwrap(), None);
        let disk = Disk::File("/somewhere/disk".into());
        write(&note, &disk).unwrap();
        assert_eq!(read(&note).unwrap(), Some(disk));
        fs::write(&note, "{").unwrap();
        assert!(read(&note).is_err());
    }
}
