use super::*;
use crate::manifest;

/// The files in circles, with their counts, of a crate with these files in `src`.
fn found(files: &[(&str, &str)]) -> Vec<String> {
    findings(files).iter().map(|found| format!("{} {}", found.path, found.value)).collect()
}

fn findings(files: &[(&str, &str)]) -> Vec<Finding> {
    let files = files.iter().copied().chain([("Cargo.toml", "[package]\nname = \"a\"")]);
    let tree = Tree::from_files(files);
    check(&tree, &manifest::packages(&tree).expect("a manifest"))
}

const LIB: (&str, &str) = ("src/lib.rs", "mod a; mod b; mod c;");

#[test]
fn check_finds_a_circle_of_two_files() {
    let a = ("src/a.rs", "use crate::b::B; pub struct A(B);");
    let b = ("src/b.rs", "use super::a::A; pub struct B(A);");
    assert_eq!(found(&[LIB, a, b, ("src/c.rs", "use crate::a::A;")]), ["src/a.rs 1", "src/b.rs 1"]);
}

#[test]
fn check_describes_a_shortest_circle() {
    let a = ("src/a.rs", "use crate::b::B; pub struct A(B);");
    let b = ("src/b.rs", "pub fn b() -> crate::c::C {} pub struct B;");
    let c = ("src/c.rs", "use crate::{a::A, b::B}; pub struct C(A);");
    let found = findings(&[LIB, a, b, c]);
    assert_eq!(found.iter().map(|found| found.value).collect::<Vec<_>>(), [1, 1, 2]);
    assert_eq!(
        found[0].detail,
        "a.rs uses crate::b::B (src/b.rs)\nb.rs uses crate::c::C (src/c.rs)\n\
         c.rs uses crate::a::A (src/a.rs)"
    );
    assert_eq!(
        found[1].detail,
        "b.rs uses crate::c::C (src/c.rs)\nc.rs uses crate::b::B (src/b.rs)"
    );
}

#[test]
fn check_accepts_imports_in_one_direction() {
    let a = ("src/a.rs", "use crate::b::B; use crate::c;  fn f() { c::g() }");
    let b = ("src/b.rs", "use crate::c::*; pub struct B;");
    assert_eq!(found(&[LIB, a, b, ("src/c.rs", "pub fn g() {}")]), Vec::<String>::new());
}

#[test]
fn check_counts_a_child_that_uses_an_item_of_its_parent() {
    let parent = ("src/lib.rs", "mod a; pub struct Top; fn f() { a::g() }");
    let child = ("src/a.rs", "use super::Top; pub fn g() {}");
    assert_eq!(found(&[parent, child]), ["src/a.rs 1", "src/lib.rs 1"]);
    let parent = ("src/lib.rs", "mod a; pub struct Top;");
    assert_eq!(found(&[parent, child]), Vec::<String>::new());
}

#[test]
fn check_follows_a_reexport_to_the_file_of_the_item() {
    let parent = ("src/lib.rs", "mod a; mod b; pub use a::A; pub use b::*;");
    let a = ("src/a.rs", "use crate::B; pub struct A;");
    let b = ("src/b.rs", "pub struct B;");
    assert_eq!(found(&[parent, a, b]), Vec::<String>::new());
    let b = ("src/b.rs", "pub struct B(crate::A);");
    assert_eq!(found(&[parent, a, b]), ["src/a.rs 1", "src/b.rs 1"]);
}

#[test]
fn check_counts_a_reexport_that_its_file_uses() {
    let a = ("src/a.rs", "use crate::Top; pub struct A;");
    let parent = ("src/lib.rs", "mod a; pub use a::A; pub struct Top;");
    assert_eq!(found(&[parent, a]), Vec::<String>::new());
    let parent = ("src/lib.rs", "mod a; pub use a::A; pub struct Top(A);");
    assert_eq!(found(&[parent, a]), ["src/a.rs 1", "src/lib.rs 1"]);
}

#[test]
fn check_follows_imported_modules_and_globs() {
    let a = ("src/a.rs", "use crate::b; pub const X: u8 = b::Y;");
    let b = ("src/b.rs", "use crate::a::*; pub const Y: u8 = 1; pub fn f() -> u8 { X }");
    assert_eq!(found(&[LIB, a, b]), ["src/a.rs 1", "src/b.rs 1"]);
    let b = ("src/b.rs", "use crate::a::*; pub const Y: u8 = 1;");
    assert_eq!(found(&[LIB, a, b]), Vec::<String>::new());
}

#[test]
fn check_gives_names_of_macros_to_the_file_of_their_module() {
    let a = ("src/a.rs", "use crate::b::Made; pub struct A;");
    let b = ("src/b.rs", "make!(Made); use crate::a::A;");
    assert_eq!(found(&[LIB, a, b]), ["src/a.rs 1", "src/b.rs 1"]);
}

#[test]
fn check_separates_a_module_from_a_function_of_its_name() {
    let parent = ("src/lib.rs", "mod a; mod b; pub use b::a;");
    let a = ("src/a.rs", "use crate::b::a; pub struct A; fn f() { a() }");
    let b = ("src/b.rs", "pub fn a() {} fn f() -> crate::a::A {}");
    assert_eq!(found(&[parent, a, b]), ["src/a.rs 1", "src/b.rs 1"]);
}

#[test]
fn check_leaves_out_tests_and_other_crates() {
    let a = ("src/a.rs", "use b::B; use ::b::C; use std::a; #[cfg(test)] mod tests;");
    let tests = ("src/a/tests.rs", "use super::*; use crate::b::B;");
    let b = ("src/b.rs", "use crate::a::f; pub struct B;");
    assert_eq!(found(&[LIB, a, tests, b]), Vec::<String>::new());
}

#[test]
fn check_reads_the_files_of_integration_tests() {
    let main = ("tests/all/main.rs", "mod a; pub fn top() { a::f() }");
    let a = ("tests/all/a.rs", "pub fn f() { crate::top() }");
    assert_eq!(found(&[main, a]), ["tests/all/a.rs 1", "tests/all/main.rs 1"]);
}

#[test]
fn check_survives_globs_and_imports_in_a_loop() {
    let a = ("src/a.rs", "pub use crate::b::*; pub use crate::b::X; fn f() -> X { Y }");
    let b = ("src/b.rs", "pub use crate::a::*; pub use crate::a::X; fn g() -> Y { X }");
    assert_eq!(found(&[LIB, a, b]), Vec::<String>::new());
}
