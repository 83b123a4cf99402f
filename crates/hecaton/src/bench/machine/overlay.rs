//! Adds this executable and its libraries to the guest that `scripts/guest.sh` built.
//!
//! In the guest, the executable carries out the bench's requests. The kernel unpacks one archive
//! after the other: the first one is compressed, the added one is not. The guest's own libraries
//! stay unchanged, because the executable starts through its own loader with its own library
//! directory.

use crate::bench::world::cluster::this_program;
use crate::bench::world::process::tool;
use anyhow::{Context as _, bail, ensure};
use std::{
    fs::{self, File},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

/// Directory of the added files in the guest.
const DIR: &str = "hecaton";

/// The loader's name in the guest.
const LOADER: &str = "ld.so";

/// The command that starts this executable in the guest.
pub(in crate::bench) fn program() -> String {
    format!("/{DIR}/{LOADER} --library-path /{DIR} /{DIR}/hecaton")
}

/// Writes the guest's archive to `to`, with the added files.
pub(in crate::bench) fn write(initramfs: &Path, to: &Path) -> anyhow::Result<()> {
    let base = fs::read(initramfs)
        .with_context(|| format!("cannot read the guest's {}", initramfs.display()))?;
    let program = this_program()?;
    let executable = fs::read(&program)
        .with_context(|| format!("cannot read this executable, {}", program.display()))?;
    let mut files = vec![("hecaton".to_owned(), loadable(&executable)?)];
    let program = program.to_str().context("this executable's path is no text")?;
    for library in libraries(&tool("ldd", &[program])?) {
        let contents = fs::read(&library.path)
            .with_context(|| format!("cannot read the library {}", library.path.display()))?;
        files.push((library.name, contents));
    }
    ensure!(files.iter().any(|(name, _)| name == LOADER), "`ldd {program}` names no loader");

    let write = || -> io::Result<()> {
        let mut archive = Archive { to: BufWriter::new(File::create(to)?), written: 0, files: 0 };
        archive.put(&base)?;
        archive.align()?;
        archive.entry(DIR, 0o040_755, &[])?;
        for (name, contents) in &files {
            archive.entry(&format!("{DIR}/{name}"), 0o100_755, contents)?;
        }
        archive.entry("TRAILER!!!", 0, &[])?;
        archive.to.flush()
    };
    write().with_context(|| format!("cannot write {}", to.display()))
}

#[derive(Debug, PartialEq, Eq)]
struct Library {
    name: String,
    path: PathBuf,
}

/// Parses lines of `ldd`: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`, and the path alone
/// for the loader. The vDSO has no file.
fn libraries(ldd: &str) -> Vec<Library> {
    let library = |line: &str| {
        let line = line.trim();
        let (name, path) = line.split_once(" => ").unwrap_or((LOADER, line));
        let path = path.split_whitespace().next()?;
        path.starts_with('/').then(|| Library { name: name.to_owned(), path: path.into() })
    };
    ldd.lines().filter_map(library).collect()
}

/// Cuts off the parts of an executable that the kernel never loads. Symbols and debugging
/// information are most of the file, and would occupy memory of the guest.
fn loadable(elf: &[u8]) -> anyhow::Result<Vec<u8>> {
    const SEGMENT_OFFSET: usize = 8;
    const SEGMENT_FILE_SIZE: usize = 32;
    let field = |at: usize, bytes: usize| -> anyhow::Result<usize> {
        let field = elf.get(at..at + bytes).context("this executable is cut off")?;
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(field);
        Ok(usize::try_from(u64::from_le_bytes(word))?)
    };
    if elf.get(..6) != Some(b"\x7fELF\x02\x01".as_slice()) {
        bail!("this executable is no 64-bit little-endian ELF file");
    }
    let (headers, size, count) = (field(32, 8)?, field(54, 2)?, field(56, 2)?);
    let mut end = headers + size * count;
    for header in (0..count).map(|number| headers + number * size) {
        let segment_end =
            field(header + SEGMENT_OFFSET, 8)? + field(header + SEGMENT_FILE_SIZE, 8)?;
        end = end.max(segment_end);
    }
    let mut loaded = elf.get(..end).context("this executable is cut off")?.to_vec();
    // Clears the section headers' offset, count and name index: these headers are cut off.
    loaded[40..48].fill(0);
    loaded[60..64].fill(0);
    Ok(loaded)
}

/// A cpio archive, "newc" (kernel: Documentation/driver-api/early-userspace/buffer-format.rst).
struct Archive<W> {
    to: W,
    written: usize,
    files: u32,
}

impl<W: Write> Archive<W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.to.write_all(bytes)
    }

    fn align(&mut self) -> io::Result<()> {
        let missing = self.written.next_multiple_of(4) - self.written;
        self.put(&[0; 3][..missing])
    }

    fn entry(&mut self, name: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        self.files += 1;
        let length = u32::try_from(contents.len()).map_err(io::Error::other)?;
        let name_length = u32::try_from(name.len() + 1).map_err(io::Error::other)?;
        // Inode, mode, user, group, links, time, length, device (major, minor), number of a device
        // node (major, minor), length of the name, checksum.
        let fields = [self.files, mode, 0, 0, 1, 0, length, 0, 0, 0, 0, name_length, 0];
        let fields: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        self.put(format!("070701{fields}{name}\0").as_bytes())?;
        self.align()?;
        self.put(contents)?;
        self.align()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn ldd_is_understood() {
        let said = "\tlinux-vdso.so.1 (0x00007ffd)\n\
                    \tlibgcc_s.so.1 => /lib/x86_64-linux-gnu/libgcc_s.so.1 (0x00007f12)\n\
                    \tlibmissing.so => not found\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f12)\n";
        let library = |name: &str, path: &str| Library { name: name.into(), path: path.into() };
        let expected = [
            library("libgcc_s.so.1", "/lib/x86_64-linux-gnu/libgcc_s.so.1"),
            library("ld.so", "/lib64/ld-linux-x86-64.so.2"),
        ];
        assert_eq!(libraries(said), expected);
    }

    #[test]
    fn what_is_loadable_still_runs() {
        let dir = tempfile::tempdir().unwrap();
        let whole = fs::read(std::env::current_exe().unwrap()).unwrap();
        let loaded = loadable(&whole).unwrap();
        assert!(loaded.len() <= whole.len());
        let path = dir.path().join("cut");
        fs::write(&path, loaded).unwrap();
        let mut mode = fs::metadata(&path).unwrap().permissions();
        std::os::unix::fs::PermissionsExt::set_mode(&mut mode, 0o755);
        fs::set_permissions(&path, mode).unwrap();
        // Other tests fork while the file is open for writing. The loader runs it; it only reads.
        let libraries = libraries(&tool("ldd", &[path.to_str().unwrap()]).unwrap());
        let loader = libraries.iter().find(|library| library.name == LOADER).unwrap();
        let listed = Command::new(&loader.path).arg(&path).arg("--list").output().unwrap();
        assert!(String::from_utf8_lossy(&listed.stdout).contains("what_is_loadable_still_runs"));
        assert!(loadable(&whole[..100]).is_err());
        assert!(loadable(b"#!/bin/sh").is_err());
    }

    #[test]
    fn the_archive_is_one_that_cpio_reads() {
        let mut archive = Archive { to: Vec::new(), written: 0, files: 0 };
        archive.entry("a", 0o040_755, &[]).unwrap();
        archive.entry("a/file", 0o100_644, b"12345").unwrap();
        archive.entry("TRAILER!!!", 0, &[]).unwrap();
        assert_eq!(archive.written % 4, 0);
        assert_eq!(&archive.to[..6], b"070701");
        let spawned = Command::new("cpio")
            .args(["--quiet", "-t"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut cpio) = spawned else {
            return println!("skipped: the_archive_is_one_that_cpio_reads: no cpio");
        };
        cpio.stdin.take().unwrap().write_all(&archive.to).unwrap();
        let listed = cpio.wait_with_output().unwrap();
        assert_eq!(String::from_utf8_lossy(&listed.stdout), "a\na/file\n");
    }
}
