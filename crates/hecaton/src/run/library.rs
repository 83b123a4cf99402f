//! Where `libhecaton.so` is, and how the dynamic linker is told of it.

use anyhow::{Context as _, bail};
use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The dynamic linker's variable.
pub(crate) const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

const LIBRARY: &str = "libhecaton.so";

/// Where the library may be, seen from the executable's directory: beside it in a build, below
/// the prefix in an installation.
const PLACES: [&str; 2] = ["", "../lib/hecaton"];

/// The library's path.
pub(crate) fn find() -> anyhow::Result<PathBuf> {
    let program = env::current_exe().context("cannot tell where the hecaton command is")?;
    let bin = program.parent().unwrap_or(Path::new("/"));
    find_from(bin)
}

fn find_from(bin: &Path) -> anyhow::Result<PathBuf> {
    let Some(found) =
        PLACES.iter().map(|place| bin.join(place).join(LIBRARY)).find(|p| p.is_file())
    else {
        bail!(
            "{LIBRARY} is neither in {} nor in {}; build it with `cargo build --release -p \
             hecaton-preload`, or install Hecaton anew",
            bin.display(),
            bin.join(PLACES[1]).display()
        );
    };
    let path = found.canonicalize().with_context(|| format!("cannot use {}", found.display()))?;
    if path.as_os_str().as_bytes().iter().any(|byte| b" :".contains(byte)) {
        bail!(
            "{} cannot be preloaded: the dynamic linker takes spaces and colons for separators; \
             install Hecaton elsewhere",
            path.display()
        );
    }
    Ok(path)
}

/// The value of [`PRELOAD_VARIABLE`]: the library first, then what is preloaded already.
pub(super) fn preload_value(library: &Path) -> OsString {
    join(library.as_os_str(), env::var_os(PRELOAD_VARIABLE).as_deref())
}

/// The options of AddressSanitizer's runtime.
pub(super) const SANITIZER_VARIABLE: &str = "ASAN_OPTIONS";

/// The value of [`SANITIZER_VARIABLE`]: what the user has set, and that another library may be
/// loaded before the runtime. Without it the runtime ends the program.
pub(super) fn sanitizer_options() -> OsString {
    with_link_order(env::var_os(SANITIZER_VARIABLE).as_deref())
}

fn with_link_order(existing: Option<&OsStr>) -> OsString {
    const OPTION: &str = "verify_asan_link_order";
    let mut value = existing.unwrap_or_default().to_owned();
    let is_set = value.as_bytes().windows(OPTION.len()).any(|part| part == OPTION.as_bytes());
    if !is_set {
        let colon = if value.is_empty() { "" } else { ":" };
        value.push(format!("{colon}{OPTION}=0"));
    }
    value
}

fn join(library: &OsStr, existing: Option<&OsStr>) -> OsString {
    let mut value = library.to_owned();
    if let Some(existing) = existing.filter(|existing| !existing.is_empty()) {
        value.push(":");
        value.push(existing);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn is_found_beside_the_command_or_in_lib() {
        let prefix = tempfile::tempdir().unwrap();
        let (bin, lib) = (prefix.path().join("bin"), prefix.path().join("lib/hecaton"));
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(&lib).unwrap();
        let error = find_from(&bin).expect_err("there is none").to_string();
        assert!(error.contains("hecaton-preload"), "{error}");
        fs::write(lib.join(LIBRARY), "").unwrap();
        let installed = lib.join(LIBRARY).canonicalize().unwrap();
        assert_eq!(find_from(&bin).unwrap(), installed);
        fs::write(bin.join(LIBRARY), "").unwrap();
        assert_eq!(find_from(&bin).unwrap(), bin.join(LIBRARY).canonicalize().unwrap());
    }

    #[test]
    fn a_path_that_cannot_be_preloaded_is_refused() {
        let prefix = tempfile::Builder::new().prefix("with space").tempdir().unwrap();
        fs::write(prefix.path().join(LIBRARY), "").unwrap();
        assert!(find_from(prefix.path()).is_err());
    }

    #[test]
    fn sanitizer_options_of_the_user_stay() {
        let with = |existing: Option<&str>| with_link_order(existing.map(OsStr::new));
        assert_eq!(with(None), "verify_asan_link_order=0");
        assert_eq!(with(Some("")), "verify_asan_link_order=0");
        assert_eq!(with(Some("detect_leaks=0")), "detect_leaks=0:verify_asan_link_order=0");
        assert_eq!(with(Some("verify_asan_link_order=1")), "verify_asan_link_order=1");
    }

    #[test]
    fn what_was_preloaded_stays() {
        let library = OsStr::new("/l.so");
        assert_eq!(join(library, None), "/l.so");
        assert_eq!(join(library, Some(OsStr::new(""))), "/l.so");
        assert_eq!(join(library, Some(OsStr::new("/a.so /b.so"))), "/l.so:/a.so /b.so");
    }
}
