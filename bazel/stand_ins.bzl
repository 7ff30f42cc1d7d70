"""Stand-ins, for WORKSPACE, for the repositories that old versions of Bazel would download."""

def _repository_impl(repository_ctx):
    for path, content in repository_ctx.attr.files.items():
        repository_ctx.file(path, content)

_repository = repository_rule(
    implementation = _repository_impl,
    attrs = {"files": attr.string_dict(doc = "Contents by path.")},
)

def native_rules(name, package, rules):
    """A repository of rules, made of those that old versions of Bazel have built in.

    With it, BUILD files load from the repository whichever version of Bazel reads them.

    Args:
      name: The name of the repository.
      package: The package whose defs.bzl has the rules.
      rules: The names of the rules.
    """
    _repository(
        name = name,
        files = {
            package + "/BUILD": "",
            package + "/defs.bzl": "".join(["{0} = native.{0}\n".format(rule) for rule in rules]),
        },
    )

def empty_filegroups(name, targets):
    """A repository of tools that are asked for but not used.

    Args:
      name: The name of the repository.
      targets: The names of the tools.
    """
    _repository(
        name = name,
        files = {
            "BUILD": "".join([
                'filegroup(name = "{}", visibility = ["//visibility:public"])\n'.format(target)
                for target in targets
            ]),
        },
    )
