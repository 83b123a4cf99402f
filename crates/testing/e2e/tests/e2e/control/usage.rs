//! Tests that bad input gives one clear line, the right exit status and no leftovers.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, PATIENCE},
    process::run,
};
use anyhow::ensure;
use std::{
    fs::{self, DirBuilder},
    net::TcpListener,
    os::unix::fs::DirBuilderExt as _,
    process::{Command, Stdio},
};

pub(crate) fn bad_input_is_one_clear_line(cluster: &Cluster) -> TestResult {
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let taken_address = taken.local_addr()?.to_string();
    let empty = cluster.file("empty");
    let empty = empty.to_string_lossy();
    let nobody = "http://127.0.0.1:9";
    let cases: &[(&[&str], i32, &str)] = &[
        (&["run", "--local", "12Q", "--", "true"], 2, "12Q"),
        (&["run", "--local", "4K", "--", "true"], 2, "4K"),
        (&["run", "--local", "900T", "--", "true"], 2, "900T"),
        (&["run", "--local", "64M", "--", "no-such-program"], 127, "no-such-program"),
        (&["run", "--manager", nobody, "--local", "64M", "--", "true"], 1, "127.0.0.1:9"),
        (&["run", "--manager", "nonsense", "--local", "64M", "--", "true"], 2, "nonsense"),
        (&["status", "--manager", nobody], 1, "127.0.0.1:9"),
        (&["status", "--dir", &empty], 1, &empty),
        (&["manager", "--listen", &taken_address], 1, &taken_address),
        (&["dev", "--listen", &taken_address, "--dir", &empty], 1, &taken_address),
        (&["dev", "--donors", "3", "--lend", "900T", "--dir", &empty], 2, "900T"),
    ];
    for (arguments, code, said) in cases {
        let mut command = Command::new(&cluster.hecaton);
        command.args(*arguments).stdin(Stdio::null());
        if arguments[0] == "run" && !arguments.contains(&"--manager") {
            command.env("HECATON_MANAGER", &cluster.url);
        } else {
            command.env_remove("HECATON_MANAGER");
        }
        DirBuilder::new().recursive(true).mode(0o700).create(&*empty)?;
        let ended = run(&mut command, PATIENCE)?;
        let what = format!("{arguments:?} said {:?}", ended.stderr);
        ensure!(ended.status.code() == Some(*code), "{what} and ended with {}", ended.status);
        ensure!(ended.stderr.contains(said), "{what}, without {said}");
        ensure!(ended.stderr.lines().count() == 1, "{what}: not one line");
    }
    // A node may remove a directory that it leaves empty.
    let left: Vec<_> = fs::read_dir(&*empty).into_iter().flatten().flatten().collect();
    ensure!(left.is_empty(), "something was left behind: {left:?}");
    Ok(Outcome::Passed)
}
