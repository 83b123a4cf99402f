//! Programs of this machine for a guest that has none of their libraries: an archive on a drive.

use crate::harness::{
    cluster::{Cluster, LONG, succeed},
    process::run,
};
use anyhow::{Context as _, ensure};
use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// The programs with the libraries that they need, and `script`, all in a directory of this name.
pub(crate) fn archive(
    cluster: &Cluster,
    name: &str,
    programs: &[&Path],
    script: &str,
) -> anyhow::Result<PathBuf> {
    let dir = cluster.dir(name)?;
    let ended = succeed(Command::new("ldd").args(programs))?;
    let said = ended.text();
    let libraries = said.lines().filter_map(|line| line.split(" => ").nth(1)?.split(' ').next());
    let libraries: BTreeSet<&Path> = libraries.map(Path::new).collect();
    ensure!(!libraries.is_empty(), "ldd says {said}");
    for file in libraries.into_iter().chain(programs.iter().copied()) {
        let name = file.file_name().with_context(|| format!("{} has no name", file.display()))?;
        fs::copy(file, dir.join(name))?;
    }
    fs::write(dir.join("script"), script)?;
    let archive = cluster.file(&format!("{name}.tar"));
    let parent = dir.parent().context("a directory within another")?;
    let mut tar = Command::new("tar");
    tar.arg("-cf").arg(&archive).arg("-C").arg(parent).arg(name);
    run(&mut tar, LONG)?.expect_success("tar")?;
    fs::remove_dir_all(dir)?;
    Ok(archive)
}

/// Where a program is, which may be one of the administrator's.
pub(crate) fn installed(name: &str) -> anyhow::Result<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let places = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    let mut found = places.map(|place| place.join(name)).filter(|program| program.is_file());
    found.next().with_context(|| format!("there is no {name}"))
}
