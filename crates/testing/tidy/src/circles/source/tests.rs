use super::*;

fn uses(text: &str) -> Vec<String> {
    let shown = |found: &Use| {
        let path = found.path.join("::");
        let path = if found.reexport { format!("pub {path}") } else { path };
        match &found.binding {
            Binding::Name(name) => format!("{path} as {name}"),
            Binding::Glob => format!("{path}::*"),
            Binding::Unnamed => format!("{path} as _"),
        }
    };
    Source::parse(text).uses.iter().map(shown).collect()
}

fn items(text: &str) -> Vec<String> {
    Source::parse(text).items.into_iter().collect()
}

fn paths(code: &str) -> Vec<String> {
    let found = Source::parse(&format!("fn f() {{ {code} }}")).paths;
    found.iter().map(|path| path.join("::")).filter(|path| path != "f").collect()
}

#[test]
fn parse_lists_each_leaf_of_use_trees() {
    assert_eq!(
        uses(
            "use crate::{a::{self, B as C, D as _}, e::*}; pub(crate) use super::f::G; use ::h::I;"
        ),
        [
            "crate::a as a",
            "crate::a::B as C",
            "crate::a::D as _",
            "crate::e::*",
            "pub super::f::G as G",
            "::h::I as I"
        ]
    );
}

#[test]
fn parse_finds_use_declarations_in_blocks() {
    assert_eq!(uses("fn f() -> impl A + use<'_> { { use crate::a::B; B } }"), ["crate::a::B as B"]);
}

#[test]
fn parse_lists_items_of_every_kind() {
    let text = "pub const unsafe fn a() {} struct B { x: u8 } enum C {} pub(super) trait D {} \
                type E = [u8; { 1 }]; const F: G = G { x: 1 }; static mut H: u8 = 0; \
                macro_rules! i { () => {} } unsafe extern \"C\" { fn j(); } async fn k() {} \
                extern \"C\" fn l() {} struct M(u8); impl N { fn no() {} } union O { x: u8 }";
    let expected = ["B", "C", "D", "E", "F", "H", "M", "O", "a", "i", "j", "k", "l"];
    assert_eq!(items(text), expected);
}

#[test]
fn parse_lists_modules_with_path_and_block() {
    let found = Source::parse("#[path = \"../x.rs\"] mod a; pub mod b { fn c() {} }").modules;
    assert_eq!((found[0].name.as_str(), found[0].path.as_deref()), ("a", Some("../x.rs")));
    assert_eq!(found[0].inline, None);
    let block = found[1].inline.as_ref().expect("a block");
    assert_eq!(block.items, BTreeSet::from(["c".to_owned()]));
}

#[test]
fn parse_leaves_out_code_for_tests() {
    let text = "#[cfg(test)] mod tests { use a::B; } #[cfg(all(unix, test))] use c::D; \
                #[cfg(test)] fn e() { f::g() } impl H { #[cfg(test)] fn i() { j::k() } }";
    let found = Source::parse(text);
    assert_eq!((found.modules, found.uses), (vec![], vec![]));
    assert_eq!(found.paths, BTreeSet::from(["impl", "H"].map(|name| vec![name.to_owned()])));
}

#[test]
fn parse_keeps_code_that_tests_share() {
    assert_eq!(uses("#[cfg(any(test, feature = \"x\"))] use a::B;"), ["a::B as B"]);
    assert_eq!(uses("#[cfg(not(test))] use a::B;"), ["a::B as B"]);
}

#[test]
fn parse_finds_paths_in_code_and_macro_arguments() {
    assert_eq!(paths("crate::a::b(1); println!(\"{}\", super::c::D);").join(" "), {
        "crate::a::b println super::c::D"
    });
    assert_eq!(paths("a::B::<C>::d(); <E as f::G>::h()").join(" "), "C E a::B as f::G");
    assert_eq!(paths("$crate::a!(); 0..b; 'c: loop { d.e }").join(" "), "b crate::a d loop");
}

#[test]
fn parse_ignores_fields_strings_and_comments() {
    assert_eq!(paths("A { b: \"crate::c\", }; d.e(); // crate::g\n").join(" "), "A d");
    assert_eq!(paths("/* crate::a */ r#\"crate::b\"#; '\"'; b'\\''; 1.0"), Vec::<String>::new());
}

#[test]
fn parse_survives_text_that_is_not_rust() {
    assert_eq!(Source::parse("fn f( {"), Source::default());
    for text in ["pub", "unsafe", "#", "use", "use a::", "mod", "fn", "extern \"C\"", "const"] {
        let _ = Source::parse(text);
    }
}
