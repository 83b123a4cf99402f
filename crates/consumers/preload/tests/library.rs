//! Checks what `libhecaton.so` is to a program that preloads it.

use std::{
    env,
    path::PathBuf,
    process::{Command, Output},
};

/// Where cargo builds the library for this test.
fn library() -> PathBuf {
    let test = env::current_exe().expect("the test is a file");
    test.with_file_name("libhecaton.so")
}

fn preloaded(program: &str) -> Output {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", library()).output().expect("the program starts")
}

#[test]
fn program_that_no_pager_serves_runs_as_without() {
    assert!(library().is_file(), "{} is not built", library().display());
    let output = preloaded("true");
    let said = String::from_utf8_lossy(&output.stderr);
    // The loader says so of a library that it cannot load.
    assert!(output.status.success() && said.is_empty(), "{}: {said}", output.status);
}
