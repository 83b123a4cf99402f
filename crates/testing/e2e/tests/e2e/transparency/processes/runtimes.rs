//! Runs programs on the pool that have a runtime of their own below libc: sanitizers, allocators.

use super::super::native::same_as_native;
use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG, PATIENCE},
    process::{missing, run},
};
use anyhow::{Context as _, ensure};
use std::{fs, path::Path, process::Command};

/// Threads that use more memory than is local; a child that compares it, except if HOW is `alone`;
/// and then what HOW says.
const SOURCE: &str = r#"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
enum { THREADS = 4, LEN = 16 << 20 };
static unsigned char *part[THREADS];
static unsigned char at(long thread, size_t i) { return i * 31 + thread + 1; }
static void *fill(void *number) {
    long thread = (long)number;
    part[thread] = malloc(LEN);
    for (size_t i = 0; i < LEN; i++) part[thread][i] = at(thread, i);
    return NULL;
}
static int compare(void) {
    for (long thread = 0; thread < THREADS; thread++)
        for (size_t i = 0; i < LEN; i += 61)
            if (part[thread][i] != at(thread, i)) return 1;
    return 0;
}
int main(int count, char **words) {
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, fill, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    int wrong = compare(), status = 0;
    if (count == 1 || strcmp(words[1], "alone") != 0) {
        pid_t child = fork();
        if (child == 0) _exit(compare());
        waitpid(child, &status, 0);
    }
    printf("%d wrong, child %d\n", wrong, status);
    fflush(stdout);
    if (count > 1 && strcmp(words[1], "overflow") == 0) {
        volatile char *small = malloc(10);
        small[10] = 1;
    }
    if (count > 1 && strcmp(words[1], "leak") == 0) {
        void *volatile lost = malloc(1000);
        lost = NULL;
    }
    return 0;
}
"#;

/// Builds the program; `None` if this machine's compiler lacks what an option takes.
fn build(cluster: &Cluster, options: &[&str]) -> anyhow::Result<Option<String>> {
    let (source, program) = (cluster.file("runtime.c"), cluster.file("runtime"));
    fs::write(&source, SOURCE)?;
    let mut compiler = Command::new("gcc");
    compiler.args(["-O1", "-g", "-pthread"]).args(options).arg("-o").args([&program, &source]);
    let is_built = run(&mut compiler, LONG)?.status.success();
    // A sanitizer may not know this kernel's address space.
    let runs = is_built && run(&mut Command::new(&program), LONG)?.status.success();
    Ok(runs.then(|| program.to_string_lossy().into_owned()))
}

pub(crate) fn address_sanitizer_checks(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("gcc") {
        return Ok(Outcome::Skipped(reason));
    }
    let Some(program) = build(cluster, &["-fsanitize=address"])? else {
        return Ok(Outcome::Skipped("gcc has no AddressSanitizer here".to_owned()));
    };
    let stats = same_as_native(cluster, "32M", &[&program])?;
    ensure!(stats["pager"]["pages_out"].as_u64() > Some(1000), "too few pages left: {stats}");
    for (how, said) in [("overflow", "heap-buffer-overflow"), ("leak", "detected memory leaks")] {
        let native = run(Command::new(&program).arg(how), LONG)?;
        ensure!(native.stderr.contains(said), "natively: {} {}", native.status, native.stderr);
        let pooled = run(cluster.on_pool("32M", &program).arg(how), LONG)?;
        ensure!(pooled.stderr.contains(said), "{how}: {} {}", pooled.status, pooled.stderr);
        ensure!(pooled.status == native.status, "{how}: {}", pooled.status);
    }
    Ok(Outcome::Passed)
}

pub(crate) fn thread_sanitizer_checks(cluster: &Cluster) -> TestResult {
    if let Some(reason) = missing("gcc") {
        return Ok(Outcome::Skipped(reason));
    }
    let Some(program) = build(cluster, &["-fsanitize=thread"])? else {
        return Ok(Outcome::Skipped("gcc has no ThreadSanitizer here".to_owned()));
    };
    same_as_native(cluster, "32M", &[&program, "alone"])?;
    Ok(Outcome::Passed)
}

/// Libraries that the user preloads stay loaded, after ours.
pub(crate) fn preloaded_allocators_stay(cluster: &Cluster) -> TestResult {
    let names = ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"];
    let is_there = |name: &&str| Path::new("/usr/lib/x86_64-linux-gnu").join(name).is_file();
    let found: Vec<_> = names.into_iter().filter(is_there).collect();
    if found.is_empty() || missing("gcc").is_some() {
        return Ok(Outcome::Skipped(format!("gcc and one of {names:?} are needed")));
    }
    let program = build(cluster, &[])?.context("gcc builds nothing")?;
    for name in found {
        let mut command = cluster.on_pool("32M", "sh");
        let script = "grep -c \"$0\" /proc/self/maps >/dev/null && exec \"$1\"";
        command.args(["-c", script, name, &program]).env("LD_PRELOAD", name);
        let ended = run(&mut command, PATIENCE)?;
        ensure!(ended.text() == "0 wrong, child 0\n", "{name}: {} {}", ended.status, ended.stderr);
    }
    Ok(Outcome::Passed)
}
