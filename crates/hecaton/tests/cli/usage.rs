//! Tests that command-line errors take one line and set the right exit status.
//! Wrong usage exits with 2, a missing resource with 1, an unusable program with 126 or 127.

use crate::common::{executable, hecaton, output, scratch, text};
use std::process::Output;

fn one_line(output: &Output) -> String {
    let error = text(&output.stderr);
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("hecaton: "), "{error}");
    error
}

#[test]
fn bad_usage_is_named_with_its_value() {
    let dir = scratch();
    let cases: &[(&[&str], &[&str])] = &[
        (&["explode"], &["explode"]),
        (&["dev", "--lend", "5Q"], &["5Q", "512M or 8G"]),
        (&["dev", "--lend", "1M"], &["--lend 1M", "at least 64M"]),
        (&["dev", "--lend", "900T"], &["--lend 900T", "this machine"]),
        (&["dev", "--lend", "64M", "--numa", "first"], &["first", "--numa", "or `all`"]),
        (&["dev", "--lend", "64M", "--numa", "999"], &["--numa 999", "nodes that have some"]),
        (&["dev", "--huge-pages"], &["--lend"]),
        (&["node", "--numa", "0", "--name", "a", "--manager", "http://127.0.0.1:1"], &["--lend"]),
        (
            &["node", "--name", "a", "--lend", "64M", "--keep-free", "900T"],
            &["--keep-free 900T", "this machine"],
        ),
        (&["node", "--name", "a", "--keep-free", "1G"], &["--lend"]),
        (&["node", "recall", "a"], &["--to <SIZE>"]),
        (&["node", "recall", "a", "--to", "some"], &["some", "--to"]),
        (&["node", "recall", "a", "--to", "1G", "--cancel"], &["--cancel"]),
        (&["dev", "--donors", "0"], &["'0'", "--donors"]),
        (&["dev", "--listen", "0.0.0.0:0"], &["0.0.0.0:0", "loopback"]),
        (&["manager", "--listen", "192.0.2.1:80"], &["192.0.2.1:80", "--insecure"]),
        (
            &["manager", "--etcd", "https://127.0.0.1:1"],
            &["--etcd https://127.0.0.1:1", "--etcd-tls DIR"],
        ),
        (
            &["manager", "--etcd", "http://127.0.0.1:1", "--etcd-tls", "x"],
            &["--etcd-tls x", "nothing is encrypted"],
        ),
        (&["manager", "--etcd", "http://192.0.2.1:1"], &["http://192.0.2.1:1", "--etcd-tls"]),
        (&["manager", "--listen", "here"], &["here", "--listen"]),
        (&["node", "--name", "a"], &["--manager URL"]),
        (&["status", "--manager", "https://127.0.0.1:1"], &["--tls-dir DIR", "HECATON_TLS"]),
        (
            &["status", "--manager", "http://127.0.0.1:1", "--tls-dir", "pki"],
            &["--tls-dir", "http://127.0.0.1:1", "nothing is encrypted"],
        ),
        (&["pki", "issue", "a", "--role", "root"], &["root", "read-only"]),
        (&["pki", "issue", "../a", "--role", "node"], &["`../a`"]),
        (&["pki", "issue", "m", "--role", "manager"], &["--host"]),
        (&["pki", "issue", "a", "--role", "node", "--host", "h"], &["--host h", "managers"]),
        (&["pki", "issue", "a", "--role", "node", "--days", "0"], &["0", "--days"]),
        (&["pki", "token"], &["--at"]),
        (&["pki", "token", "--at", "here"], &["`here`", "HOST:PORT"]),
        (&["pki", "token", "--at", "m:1", "--name", "a", "--uses", "2"], &["--name", "--uses"]),
        (
            &["node", "--name", "a", "--manager", "https://127.0.0.1:1", "--join", "token"],
            &["--join", "--tls-dir DIR"],
        ),
        (&["node", "--name", "a b", "--manager", "http://127.0.0.1:1"], &["`a b`"]),
        (&["node", "--name", "a", "--manager", "127.0.0.1:1"], &["`127.0.0.1:1`", "http://"]),
        (&["status", "--manager", "ftp://x"], &["`ftp://x`", "http://HOST:PORT"]),
        (&["run", "--local", "1M", "true"], &["--local 1M", "at least 16M"]),
        (&["run", "--local", "900T", "true"], &["--local 900T", "this machine"]),
        (&["run", "--local", "lots", "true"], &["lots", "--local"]),
        (&["run", "--name", "a/b", "true"], &["--name", "`a/b`"]),
        (&["run"], &["<COMMAND>"]),
        (&["bench", "fault", "--tls", "--manager", "http://127.0.0.1:1"], &["--tls", "--manager"]),
        (&["bench", "stream", "--manager", "http://127.0.0.1:1", "--tls"], &["--tls", "--manager"]),
        (&["completion", "tcsh"], &["tcsh"]),
    ];
    for (args, words) in cases {
        let output = hecaton()
            .args(*args)
            .env("XDG_RUNTIME_DIR", dir.path())
            .output()
            .expect("the command starts");
        let error = one_line(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        for word in *words {
            assert!(error.contains(word), "{args:?}: `{word}` is not in: {error}");
        }
    }
    let left = std::fs::read_dir(dir.path()).expect("a directory").count();
    assert_eq!(left, 0, "nothing is left behind");
}

#[test]
fn huge_pages_that_are_not_there_are_told_with_the_way_out() {
    let total: u64 = std::fs::read_to_string("/proc/meminfo")
        .expect("read")
        .lines()
        .find_map(|line| {
            line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok()
        })
        .expect("a number");
    // Free huge pages never cover all memory of the host.
    let lend = format!("{total}K");
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let output = hecaton()
        .args(["dev", "--donors", "1", "--huge-pages", "--lend", &lend, "--dir"])
        .arg(&dir)
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(1));
    let error = one_line(&output);
    assert!(
        error.contains("--huge-pages: ") && error.contains("`sysctl vm.nr_hugepages="),
        "{error}"
    );
    assert!(!dir.exists(), "nothing is left behind");
}

#[test]
fn a_wrong_log_filter_is_named() {
    let output = hecaton().arg("status").env("HECATON_LOG", "a=b=c").output().expect("starts");
    assert!(one_line(&output).contains("`a=b=c`"));
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn without_a_cluster_commands_say_how_to_get_one() {
    let dir = scratch();
    let output =
        hecaton().arg("status").env("XDG_RUNTIME_DIR", dir.path()).output().expect("starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(one_line(&output).contains("hecaton dev"));

    let output = crate::common::output(["status", "--manager", "http://127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(1));
    let error = one_line(&output);
    assert!(error.contains("http://127.0.0.1:1") && error.contains("refused"), "{error}");
}

#[test]
fn a_program_that_is_not_there_is_named() {
    for (program, status, words) in [
        ("no-such-program-anywhere", 127, "in PATH"),
        ("/no/such/file", 127, "No such file"),
        ("/", 126, "file"),
    ] {
        let output = output(["run", program]);
        assert_eq!(output.status.code(), Some(status));
        let error = one_line(&output);
        assert!(error.contains(program) && error.contains(words), "{error}");
    }
}

#[test]
fn a_static_hypervisor_is_refused() {
    // An ELF header for this architecture, and one program header of a segment to load.
    let mut elf = vec![0u8; 64 + 56];
    elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    elf[18] = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    (elf[32], elf[54], elf[56], elf[64]) = (64, 56, 1, 1);
    let dir = scratch();
    let program = executable(dir.path(), "static", &elf);
    let output = hecaton().args(["vm", "run"]).arg(&program).output().expect("starts");
    assert_eq!(output.status.code(), Some(126));
    assert!(one_line(&output).contains("statically linked"));
}

#[test]
fn help_says_what_right_is_needed_and_how_to_grant_it() {
    for command in ["run --help", "vm run --help"] {
        let output = hecaton().args(command.split(' ')).output().expect("starts");
        assert!(output.status.success());
        let help = text(&output.stdout);
        for word in ["/dev/userfaultfd", "vm.unprivileged_userfaultfd", "ptrace_scope"] {
            assert!(help.contains(word), "{word} in {help}");
        }
    }
}

#[test]
fn every_shell_gets_a_completion_script() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = output(["completion", shell]);
        assert!(output.status.success());
        assert!(text(&output.stdout).contains("hecaton"), "{shell}");
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let page = output(["man"]);
    assert!(page.status.success());
    assert!(text(&page.stdout).contains(".TH hecaton 1"));
    for command in ["dev", "node"] {
        let help = text(&output([command, "--help"]).stdout);
        assert!(help.contains("--numa <NODE|all>") && help.contains("--huge-pages"), "{help}");
    }

    let dir = scratch();
    let written = hecaton().arg("man").arg("--dir").arg(dir.path()).output().expect("starts");
    assert!(written.status.success());
    let help = text(&output(["--help"]).stdout);
    let commands = help.lines().skip_while(|line| !line.starts_with("Commands:")).skip(1);
    let commands: Vec<_> = commands.map_while(|line| line.split_whitespace().next()).collect();
    assert!(commands.contains(&"run") && commands.contains(&"bench"), "{commands:?}");
    for command in commands {
        let page = dir.path().join(format!("hecaton-{command}.1"));
        assert!(page.is_file(), "{} is missing", page.display());
    }
    assert!(dir.path().join("hecaton.1").is_file());
    assert!(!dir.path().join("hecaton-pager.1").exists(), "it is not for people");
}

#[test]
fn the_version_is_that_of_the_package() {
    let output = output(["--version"]);
    assert_eq!(text(&output.stdout), format!("hecaton {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn nothing_asked_is_answered_with_help() {
    let output = output([]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("Usage: hecaton"));
}
