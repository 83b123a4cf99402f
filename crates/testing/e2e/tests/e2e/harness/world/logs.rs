//! Keeps the logs of a failed test's daemons and the consoles of its guests, and prints their ends.

use std::{
    env, fs, io,
    path::{Path, PathBuf},
};

/// Lines of each file that are printed. The whole is kept.
const LINES: usize = 60;

/// Log files have names such as `log`, `node.log`, `console` and `guest.console`.
fn is_log(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    ["log", "console"].contains(&name.rsplit('.').next().unwrap_or_default())
}

/// Log files in a directory and those below it.
fn logs_in(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => logs_in(&path, found),
            Ok(kind) if kind.is_file() && is_log(&path) => found.push(path),
            _ => {}
        }
    }
}

/// Where the logs of a failed test are: `target/e2e-logs/TEST`.
fn kept(test: &str) -> Option<PathBuf> {
    let target = env::current_exe().ok()?.ancestors().nth(3)?.to_owned();
    Some(target.join("e2e-logs").join(test.replace("::", "/")))
}

/// Prints the ends of a world's logs, and copies all of them to where they stay.
pub(crate) fn print_and_keep(test: &str, world: &Path) {
    let mut logs = Vec::new();
    logs_in(world, &mut logs);
    logs.sort();
    for path in &logs {
        let bytes = fs::read(path).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines: Vec<&str> = text.lines().collect();
        let name = path.strip_prefix(world).unwrap_or(path).display();
        eprintln!("---- {name}: {} lines, the last of them:", lines.len());
        for line in &lines[lines.len().saturating_sub(LINES)..] {
            eprintln!("    {line}");
        }
    }
    let Some(kept) = kept(test) else { return };
    match keep(world, &logs, &kept) {
        Ok(()) => eprintln!("---- the whole of them: {}", kept.display()),
        Err(error) => eprintln!("---- they cannot be kept in {}: {error}", kept.display()),
    }
}

fn keep(world: &Path, logs: &[PathBuf], kept: &Path) -> io::Result<()> {
    if kept.exists() {
        fs::remove_dir_all(kept)?;
    }
    for path in logs {
        let to = kept.join(path.strip_prefix(world).unwrap_or(path));
        fs::create_dir_all(to.parent().unwrap_or(kept))?;
        fs::copy(path, to)?;
    }
    Ok(())
}
