//! Checks that core files never have zeros in the place of paged memory.

use crate::harness::{
    Outcome, TestResult,
    cluster::{Cluster, LONG},
    process::run,
};
use anyhow::{Context as _, ensure};
use std::{collections::HashMap, fs, ops::Range, path::Path};

const PROGRAM: &str = env!("CARGO_BIN_EXE_dumped-memory");

/// The program writes this word everywhere.
const WORD: u64 = 0x5ca1_ab1e_0ddb_a115;

pub(crate) fn have_no_false_zeros(cluster: &Cluster) -> TestResult {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern")?;
    let has_core = !pattern.starts_with('|') && !pattern.contains('/');
    for how in ["nothing", "libc", "syscall"] {
        let dir = cluster.dir(how)?;
        let mut command = cluster.on_pool("16M", "sh");
        command.current_dir(&dir).args(["-c", "ulimit -c unlimited && exec \"$0\" \"$1\""]);
        let ended = run(command.args([PROGRAM, how]), LONG)?;
        ensure!(ended.status.code() == Some(134), "{how}: {}, {}", ended.status, ended.stderr);
        let parts = parts(&ended.text()).with_context(|| format!("it said {}", ended.text()))?;
        let (memory, stack) = (&parts["memory"], &parts["stack"]);
        if has_core {
            let said = "lacks the memory that was paged";
            ensure!(ended.stderr.contains(said), "{how}: it said {:?}", ended.stderr);
            let core = Core::read_only_one_in(&dir)?;
            let (words, wrong) = core.words(&memory.range)?;
            ensure!(wrong == 0, "{how}: {wrong} of {words} words in the core are wrong");
            let (words, wrong) = core.words(&stack.range)?;
            let all = stack.range.end.saturating_sub(stack.range.start) / 8;
            ensure!((words, wrong) == (all, 0), "{how}: {words} of {all} words, {wrong} wrong");
        }
        ensure!(memory.is_left_out, "{how}: the kernel would dump memory that is paged");
        ensure!(!stack.is_left_out, "{how}: the kernel would leave the stack out");
    }
    Ok(match has_core {
        true => Outcome::Passed,
        false => Outcome::Skipped(format!(
            "kernel.core_pattern is {}: only the kernel's flags were looked at",
            pattern.trim()
        )),
    })
}

/// A part of the program's memory, as the program itself tells of it.
struct Part {
    range: Range<u64>,
    is_left_out: bool,
}

fn parts(said: &str) -> anyhow::Result<HashMap<String, Part>> {
    let part = |line: &str| {
        let words: Vec<_> = line.split_whitespace().collect();
        let [name, start, len, left_out] = words[..] else { return None };
        let (start, len): (u64, u64) = (start.parse().ok()?, len.parse().ok()?);
        let part = Part { range: start..start + len, is_left_out: left_out == "out" };
        Some((name.to_owned(), part))
    };
    said.lines().map(|line| part(line).context("a line of another form")).collect()
}

/// A core file: ELF of 64 bits, little-endian.
struct Core(Vec<u8>);

impl Core {
    fn read_only_one_in(dir: &Path) -> anyhow::Result<Core> {
        let files: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
        ensure!(files.len() == 1, "{} files instead of one core: {files:?}", files.len());
        Ok(Core(fs::read(files[0].path())?))
    }

    fn number<const N: usize>(&self, at: u64) -> anyhow::Result<u64> {
        let bytes = self.0.get(usize::try_from(at)?..).and_then(<[u8]>::first_chunk::<N>);
        let bytes = bytes.with_context(|| format!("the core ends before {at}"))?;
        Ok(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    /// How many words of this memory the core has, and how many of them are wrong.
    fn words(&self, range: &Range<u64>) -> anyhow::Result<(u64, u64)> {
        const PT_LOAD: u64 = 1;
        let (headers, entry) = (self.number::<8>(32)?, self.number::<2>(54)?);
        let (mut words, mut wrong) = (0, 0);
        for number in 0..self.number::<2>(56)? {
            let header = headers + number * entry;
            let (offset, start) = (self.number::<8>(header + 8)?, self.number::<8>(header + 16)?);
            let in_file = start..start + self.number::<8>(header + 32)?;
            if self.number::<4>(header)? != PT_LOAD {
                continue;
            }
            let both = range.start.max(in_file.start)..range.end.min(in_file.end);
            for address in both.step_by(8) {
                words += 1;
                wrong += u64::from(self.number::<8>(offset + address - start)? != WORD);
            }
        }
        Ok((words, wrong))
    }
}
