//! Finds the program to run as a shell does, and reads how it is linked.
//!
//! Refuses a program that would run on local memory without a word.

use crate::terminal::failure::CannotRun;
use rustix::fs::{Access, AtFlags, CWD};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::{env, io};

/// Interpreters of interpreters that the kernel follows.
const MAX_INTERPRETERS: usize = 4;

/// Longest first line of a script that the kernel reads.
const MAX_SHEBANG: usize = 256;

/// Most program headers that are looked at; real programs have about a dozen.
const MAX_PROGRAM_HEADERS: u16 = 256;

/// Fails for a program that exists and cannot be run.
macro_rules! refuse {
    ($($message:tt)*) => {
        return Err(CannotRun::refused(format!($($message)*)).into())
    };
}

/// A program that is there and may be executed.
#[derive(Debug)]
pub(super) struct Program {
    /// Its executable, or its script.
    pub(super) path: PathBuf,
    pub(super) linker: Linker,
}

/// The dynamic linker that a program names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Linker {
    /// Loads the library that `LD_PRELOAD` names.
    Glibc,
    /// Cannot load the library, which needs glibc.
    Musl,
    /// The program is statically linked.
    None,
}

impl Program {
    /// Finds `name` in PATH, or as a path if it has a slash, and checks it.
    pub(super) fn find(name: &OsStr) -> anyhow::Result<Program> {
        let program = Program::find_any(name)?;
        let linker = check(&program.path, 0)?;
        Ok(Program { linker, ..program })
    }

    /// Fails if no dynamic linker loads the library into the program.
    pub(super) fn check_library_loads(&self) -> anyhow::Result<()> {
        let path = self.path.display();
        match self.linker {
            Linker::Glibc => Ok(()),
            Linker::None => refuse!(
                "{path} is statically linked: no library can be loaded into it; use a dynamically \
                 linked build of it"
            ),
            Linker::Musl => refuse!(
                "{path} is linked with musl: libhecaton.so needs the GNU C library; use a build \
                 for it"
            ),
        }
    }

    /// Finds `name` the same way, for a program that needs no library. `linker` has no meaning.
    pub(super) fn find_any(name: &OsStr) -> anyhow::Result<Program> {
        let path = match name.as_bytes().contains(&b'/') {
            true => PathBuf::from(name),
            false => search_path(name)?,
        };
        check_executable(&path)?;
        Ok(Program { path, linker: Linker::Glibc })
    }
}

/// The first that can be executed, else the first that exists, as `execvp` looks for it.
fn search_path(name: &OsStr) -> anyhow::Result<PathBuf> {
    let dirs = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let candidates = || env::split_paths(&dirs).map(|dir| dir.join(name));
    let runnable = |path: &PathBuf| path.is_file() && may_execute(path).is_ok();
    let found = candidates().find(runnable).or_else(|| candidates().find(|path| path.exists()));
    found.filter(|_| !name.is_empty()).ok_or_else(|| {
        let name = name.display();
        let message = format!("cannot run `{name}`: not found in PATH; give the program's path");
        CannotRun::missing(message).into()
    })
}

fn may_execute(path: &Path) -> io::Result<()> {
    Ok(rustix::fs::accessat(CWD, path, Access::EXEC_OK, AtFlags::EACCESS)?)
}

fn unusable(path: &Path, error: &io::Error) -> CannotRun {
    CannotRun::because(error, format!("cannot run {}: {error}", path.display()))
}

fn check_executable(path: &Path) -> anyhow::Result<fs::Metadata> {
    let metadata = fs::metadata(path).map_err(|error| unusable(path, &error))?;
    if !metadata.is_file() {
        refuse!("cannot run {}: it is not a file", path.display());
    }
    may_execute(path).map_err(|error| unusable(path, &error))?;
    Ok(metadata)
}

fn check(path: &Path, depth: usize) -> anyhow::Result<Linker> {
    let unusable = |error: io::Error| unusable(path, &error);
    let metadata = check_executable(path)?;
    // A program may be executable and not readable; then the kernel alone knows what it is.
    let Ok(file) = File::open(path) else { return Ok(Linker::Glibc) };
    let mut head = Vec::new();
    (&file).take(MAX_SHEBANG as u64).read_to_end(&mut head).map_err(unusable)?;
    if let Some(interpreter) = script_interpreter(&head) {
        if depth == MAX_INTERPRETERS {
            refuse!("cannot run {}: too many interpreters of interpreters", path.display());
        }
        return check(Path::new(interpreter), depth + 1);
    }
    let linker = match linking(&file, &head).map_err(unusable)? {
        Linking::Dynamic => Linker::Glibc,
        Linking::Static => Linker::None,
        Linking::Musl => Linker::Musl,
        Linking::OtherMachine => refuse!(
            "{} is for another kind of machine than this command (32-bit, or another processor)",
            path.display()
        ),
        Linking::NotElf => {
            refuse!("{} is neither a program nor a script that begins with `#!`", path.display())
        }
    };
    if gains_privilege(path, &metadata) {
        refuse!(
            "{} runs with other rights than yours (set-user-ID, set-group-ID or file \
             capabilities), so no library can be loaded into it; run it without Hecaton, or as \
             the user that it belongs to",
            path.display()
        );
    }
    Ok(linker)
}

/// Returns the interpreter that the first line of a script names.
fn script_interpreter(head: &[u8]) -> Option<&OsStr> {
    let line = head.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let line = line.trim_ascii();
    let name = line.split(|byte| b" \t".contains(byte)).next()?;
    (!name.is_empty()).then(|| OsStr::from_bytes(name))
}

#[derive(Debug, PartialEq, Eq)]
enum Linking {
    Dynamic,
    Static,
    Musl,
    OtherMachine,
    NotElf,
}

const ELF_CLASS_64: u8 = 2;
const ELF_LITTLE_ENDIAN: u8 = 1;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;
const ELF_HEADER_BYTES: usize = 64;
const PROGRAM_HEADER_BYTES: usize = 56;

/// `e_machine` of the programs that this build's library can be loaded into.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// How a program is linked, by its ELF headers. The kernel executes no file without a segment to
/// load.
fn linking(file: &File, head: &[u8]) -> io::Result<Linking> {
    if !head.starts_with(b"\x7fELF") {
        return Ok(Linking::NotElf);
    }
    if head.len() < ELF_HEADER_BYTES
        || head[4] != ELF_CLASS_64
        || head[5] != ELF_LITTLE_ENDIAN
        || u16::from_le_bytes(field(head, 18)) != MACHINE
    {
        return Ok(Linking::OtherMachine);
    }
    let offset = u64::from_le_bytes(field(head, 32));
    let entry_bytes = u16::from_le_bytes(field(head, 54));
    let count = u16::from_le_bytes(field(head, 56));
    if usize::from(entry_bytes) < PROGRAM_HEADER_BYTES {
        return Ok(Linking::NotElf);
    }
    let mut is_loadable = false;
    for number in 0..count.min(MAX_PROGRAM_HEADERS) {
        let mut header = [0u8; PROGRAM_HEADER_BYTES];
        let at = offset.saturating_add(u64::from(number) * u64::from(entry_bytes));
        file.read_exact_at(&mut header, at)?;
        match u32::from_le_bytes(field(&header, 0)) {
            PT_INTERP => {}
            kind => {
                is_loadable |= kind == PT_LOAD;
                continue;
            }
        }
        let length = u64::from_le_bytes(field(&header, 32)).min(MAX_SHEBANG as u64);
        let mut interpreter = vec![0u8; length as usize];
        file.read_exact_at(&mut interpreter, u64::from_le_bytes(field(&header, 8)))?;
        let musl = interpreter.windows(7).any(|part| part == b"ld-musl");
        return Ok(if musl { Linking::Musl } else { Linking::Dynamic });
    }
    Ok(if is_loadable { Linking::Static } else { Linking::NotElf })
}

/// The bytes of a header's field.
fn field<const N: usize>(header: &[u8], at: usize) -> [u8; N] {
    *header[at..].first_chunk().expect("the header is whole")
}

/// Whether the kernel would start the program in secure mode (`AT_SECURE`): the dynamic linker
/// then preloads from system directories only.
fn gains_privilege(path: &Path, metadata: &fs::Metadata) -> bool {
    let user = rustix::process::geteuid();
    let set_user = metadata.mode() & 0o4000 != 0 && metadata.uid() != user.as_raw();
    // Without group execution the bit means something else.
    let set_group =
        metadata.mode() & 0o2010 == 0o2010 && metadata.gid() != rustix::process::getegid().as_raw();
    let mut value = [0u8; 64];
    let capabilities = !user.is_root()
        && rustix::fs::getxattr(path, "security.capability", &mut value[..]).is_ok();
    set_user || set_group || capabilities
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn executable(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// An ELF file with one program header of the given type, and what that header points to.
    fn elf(header_type: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0u8; ELF_HEADER_BYTES + PROGRAM_HEADER_BYTES];
        bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        bytes[18..20].copy_from_slice(&MACHINE.to_le_bytes());
        bytes[32..40].copy_from_slice(&(ELF_HEADER_BYTES as u64).to_le_bytes());
        bytes[54..56].copy_from_slice(&(PROGRAM_HEADER_BYTES as u16).to_le_bytes());
        bytes[56..58].copy_from_slice(&1u16.to_le_bytes());
        let header = ELF_HEADER_BYTES;
        bytes[header..header + 4].copy_from_slice(&header_type.to_le_bytes());
        let at = bytes.len() as u64;
        bytes[header + 8..header + 16].copy_from_slice(&at.to_le_bytes());
        bytes[header + 32..header + 40].copy_from_slice(&(data.len() as u64).to_le_bytes());
        bytes.extend_from_slice(data);
        bytes
    }

    fn refusal(path: &Path) -> String {
        Program::find(path.as_os_str()).expect_err("refused").to_string()
    }

    #[test]
    fn this_very_program_and_one_from_path_are_taken() {
        Program::find(env::current_exe().unwrap().as_os_str()).expect("dynamically linked");
        let shell = Program::find(OsStr::new("sh")).expect("every system has one");
        assert!(shell.path.is_absolute());
    }

    #[test]
    fn who_loads_libraries_into_a_program_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let dynamic = elf(PT_INTERP, b"/lib64/ld-linux-x86-64.so.2\0");
        let found = |name, bytes: &[u8]| {
            Program::find(executable(dir.path(), name, bytes).as_os_str()).expect("taken")
        };
        let program = found("dynamic", &dynamic);
        assert_eq!(program.linker, Linker::Glibc);
        program.check_library_loads().expect("the linker does");
        let fixed = found("static", &elf(1, b""));
        assert_eq!(fixed.linker, Linker::None);
        let refused = fixed.check_library_loads().expect_err("no linker does").to_string();
        assert!(refused.contains("statically linked"));
        let musl = found("musl", &elf(PT_INTERP, b"/lib/ld-musl-x86_64.so.1\0"));
        assert_eq!(musl.linker, Linker::Musl);
        let refused = musl.check_library_loads().expect_err("glibc is missing").to_string();
        assert!(refused.contains("musl"));
        let empty = refusal(&executable(dir.path(), "empty", &elf(4, b"")));
        assert!(empty.contains("neither a program nor a script"), "{empty}");
        let mut small = dynamic;
        small[4] = 1;
        let small = executable(dir.path(), "small", &small);
        assert!(refusal(&small).contains("another kind of machine"));
    }

    #[test]
    fn scripts_are_judged_by_their_interpreter() {
        let dir = tempfile::tempdir().unwrap();
        let good = executable(dir.path(), "good", b"#! /bin/sh -e\nexit 0\n");
        Program::find(good.as_os_str()).expect("a shell is dynamically linked");
        let fixed = executable(dir.path(), "static", &elf(1, b""));
        let script = format!("#!{}\n", fixed.display());
        let script = executable(dir.path(), "script", script.as_bytes());
        let script = Program::find(script.as_os_str()).expect("taken");
        assert_eq!(script.linker, Linker::None);
        let own = dir.path().join("loop");
        let looped = executable(dir.path(), "loop", format!("#!{}\n", own.display()).as_bytes());
        assert!(refusal(&looped).contains("too many interpreters"));
        let none = executable(dir.path(), "none", b"echo hello\n");
        assert!(refusal(&none).contains("neither a program nor a script"));
    }

    #[test]
    fn what_cannot_be_run_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert!(refusal(&dir.path().join("missing")).contains("missing"));
        assert!(refusal(dir.path()).contains("not a file"));
        let plain = executable(dir.path(), "plain", b"#!/bin/sh\n");
        fs::set_permissions(&plain, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(refusal(&plain).contains("plain"));
        let error = Program::find(OsStr::new("no-such-program-anywhere")).expect_err("refused");
        assert!(error.to_string().contains("no-such-program-anywhere"), "{error}");
        assert!(Program::find(OsStr::new("")).is_err());
    }

    #[test]
    fn damaged_headers_are_refused_and_not_trusted() {
        let dir = tempfile::tempdir().unwrap();
        let whole = elf(PT_INTERP, b"/lib64/ld-linux-x86-64.so.2\0");
        for length in 0..whole.len() {
            let path = executable(dir.path(), "cut", &whole[..length]);
            assert!(Program::find(path.as_os_str()).is_err(), "{length} bytes");
        }
        let mut wild = whole;
        wild[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        let wild = executable(dir.path(), "wild", &wild);
        assert!(Program::find(wild.as_os_str()).is_err());
    }
}
