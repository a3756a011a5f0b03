package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"sigs.k8s.io/yaml"

	dualcheckv1 "github.com/dualcheck/dualcheck/api/gen/dualcheck/v1"
)

func newNamespaceCommand() *cobra.Command {
	return commandGroup(&cobra.Command{
		Use:     "namespace",
		Aliases: []string{"ns"},
		Short:   "Declare namespaces and their policy",
	}, newNamespacePutCommand(), newNamespaceGetCommand(), newNamespaceListCommand(), newNamespaceDeleteCommand())
}

func newNamespacePutCommand() *cobra.Command {
	var (
		file     string
		revision int64
	)
	cmd := &cobra.Command{
		Use:   "put NAME",
		Short: "Declare a namespace or change its policy",
		Long: `Declare a namespace, or change its policy. The policy is put as a whole: what is
given neither by a flag nor in the file has its default afterwards. Flags win over
the file, whose members are named as in the contract's JSON:

  defaultLease: 60s
  retentionClass: ledger
  maxAttempts: 5

stateMachine, which comes from a file alone, is not served yet.`,
		Example: `  dualcheck namespace put payments --retention-class ledger --max-attempts 5
  dualcheck namespace put payments -f policy.yaml --revision 42`,
		Args: arguments("NAME"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	flags := addPolicyFlags(cmd)
	cmd.Flags().StringVarP(&file, "file", "f", "", "read the policy from this YAML or JSON file; - is the standard input")
	cmd.Flags().Int64Var(&revision, "revision", 0, "only if this is the policy's revision now; 0: whatever it is")
	fileFlag(cmd, "file")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		policy := &dualcheckv1.Policy{}
		if file != "" {
			raw, err := readFile(cmd, "file", file)
			if err != nil {
				return err
			}
			if policy, err = parsePolicy(raw); err != nil {
				return inputErrorf("%s is not a policy: %w", inputName("", file), err)
			}
		}
		flags.apply(cmd, policy)
		request := &dualcheckv1.PutNamespaceRequest{Namespace: &dualcheckv1.Namespace{Name: args[0], Policy: policy, Revision: revision}}
		return server.with(cmd, 0, func(ctx context.Context, to *client) error {
			answer, err := to.admin.PutNamespace(ctx, request)
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				p.head("PUT", green, "every node obeys this policy from now on")
				printNamespace(p, answer.GetNamespace(), answer.GetEffective())
			})
		})
	}
	return cmd
}

// parsePolicy reads a policy from YAML or JSON; members that it does not know,
// and those that are there twice, are errors.
func parsePolicy(raw []byte) (*dualcheckv1.Policy, error) {
	asJSON, err := yaml.YAMLToJSONStrict(raw)
	if err != nil {
		return nil, err
	}
	policy := &dualcheckv1.Policy{}
	if len(bytes.TrimSpace(asJSON)) == 0 || string(bytes.TrimSpace(asJSON)) == "null" {
		return policy, nil
	}
	if asJSON, err = plainPolicy(asJSON); err != nil {
		return nil, err
	}
	if err := protojson.Unmarshal(asJSON, policy); err != nil {
		return nil, err
	}
	return policy, nil
}

// plainPolicy writes the words of a policy's JSON as the contract has them: ledger
// is RETENTION_LEDGER. It says what is wrong with words and durations.
func plainPolicy(raw []byte) ([]byte, error) {
	var members map[string]json.RawMessage
	if json.Unmarshal(raw, &members) != nil {
		return nil, errors.New("its members are not named")
	}
	fields := (&dualcheckv1.Policy{}).ProtoReflect().Descriptor().Fields()
	for name, value := range members {
		field := fields.ByJSONName(name)
		if field == nil {
			field = fields.ByTextName(name)
		}
		var word string
		if field == nil || string(value) == "null" {
			continue
		}
		isWord := json.Unmarshal(value, &word) == nil
		switch {
		case field.Enum() != nil && isWord:
			known, err := enumWord(field.Enum(), word)
			if err != nil {
				return nil, fmt.Errorf("%s is %q, %w", name, word, err)
			}
			members[name] = json.RawMessage(strconv.Quote(known))
		case field.Message() != nil && field.Message().FullName() == "google.protobuf.Duration":
			if !isWord || protojson.Unmarshal(value, &durationpb.Duration{}) != nil {
				return nil, fmt.Errorf("%s is %s, and durations are written in seconds: \"90s\"", name, value)
			}
		}
	}
	return json.Marshal(members)
}

// enumWord is the full name of an enum's value that word names in any case, with
// or without what all its names begin with.
func enumWord(enum protoreflect.EnumDescriptor, word string) (string, error) {
	values := enum.Values()
	prefix := string(values.Get(0).Name())
	for i := range values.Len() {
		for !strings.HasPrefix(string(values.Get(i).Name()), prefix) {
			prefix = prefix[:strings.LastIndex(strings.TrimSuffix(prefix, "_"), "_")+1]
		}
	}
	asked := strings.ReplaceAll(strings.ToUpper(word), "-", "_")
	var words []string
	for i := range values.Len() {
		name := string(values.Get(i).Name())
		if asked == name || prefix+asked == name {
			return name, nil
		}
		if values.Get(i).Number() != 0 {
			words = append(words, strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(name, prefix)), "_", "-"))
		}
	}
	return "", fmt.Errorf("it must be one of: %s", strings.Join(words, ", "))
}

// counted is a number of things by their name: 1 record, 2 records.
func counted(n int64, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

func newNamespaceGetCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "get NAME",
		Short: "Show a namespace and what its policy comes to",
		Args:  arguments("NAME"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		return server.with(cmd, 0, func(ctx context.Context, to *client) error {
			answer, err := to.admin.GetNamespace(ctx, &dualcheckv1.GetNamespaceRequest{Name: args[0]})
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				if answer.GetDeleting() {
					p.head("DELETING", yellow, "its delete is under way, or was interrupted: repeat it")
				}
				printNamespace(p, answer.GetNamespace(), answer.GetEffective())
			})
		})
	}
	return cmd
}

func newNamespaceListCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List declared namespaces by name",
		Args:  arguments(),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	list := listing[*dualcheckv1.Namespace]{
		name: "namespaces",
		head: []string{"NAME", "REVISION", "POLICY"},
		row: func(n *dualcheckv1.Namespace) []string {
			return []string{printable(n.GetName()), fmt.Sprint(n.GetRevision()), dash(strings.Join(policyWords(n.GetPolicy()), " "))}
		},
		fetch: func(ctx context.Context, to *client, size int32, token string) ([]*dualcheckv1.Namespace, string, error) {
			answer, err := to.admin.ListNamespaces(ctx, &dualcheckv1.ListNamespacesRequest{PageSize: size, PageToken: token})
			return answer.GetNamespaces(), answer.GetNextPageToken(), err
		},
	}
	list.addFlags(cmd, 0)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return list.print(cmd, server) }
	return cmd
}

func newNamespaceDeleteCommand() *cobra.Command {
	request := &dualcheckv1.DeleteNamespaceRequest{}
	cmd := &cobra.Command{
		Use:   "delete NAME",
		Short: "Withdraw a namespace's declaration",
		Long: `Withdraw a namespace's declaration. While it has records this is refused, unless
--force is given: then every record is forgotten as well. That may take long, and
is safe to repeat.`,
		Args: arguments("NAME"),
	}
	server := addClientFlags(cmd)
	addOutputFlag(cmd)
	cmd.Flags().BoolVar(&request.Force, "force", false, "forget all its records too")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		request.Name = args[0]
		var extra time.Duration
		if request.Force && !cmd.Flags().Changed("timeout") {
			extra = 10 * time.Minute
		}
		return server.with(cmd, extra, func(ctx context.Context, to *client) error {
			answer, err := to.admin.DeleteNamespace(ctx, request)
			if err != nil {
				return err
			}
			return printMessage(cmd, answer, func(p *page) {
				p.head("DELETED", green, "it has the default policy again")
				p.field("forgotten", counted(answer.GetForgotten(), "record"))
			})
		})
	}
	return cmd
}

// printNamespace shows a namespace: what was set and what it comes to.
func printNamespace(p *page, n *dualcheckv1.Namespace, effective *dualcheckv1.Policy) {
	p.field("name", printable(n.GetName()))
	p.field("revision", fmt.Sprint(n.GetRevision()))
	p.field("set", dash(strings.Join(policyWords(n.GetPolicy()), " ")))
	p.line("  effective")
	for _, word := range policyWords(effective) {
		name, value, _ := strings.Cut(word, "=")
		p.line("    "+name, value)
	}
}

// policyWords is each field of a policy that is set, as name=value by the
// contract's JSON, in the contract's order.
func policyWords(policy *dualcheckv1.Policy) []string {
	var words []string
	m := policy.ProtoReflect()
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		if !m.Has(field) {
			continue
		}
		words = append(words, field.JSONName()+"="+policyValue(field, m.Get(field)))
	}
	return words
}

// policyValue shows one field of a policy.
func policyValue(field protoreflect.FieldDescriptor, v protoreflect.Value) string {
	switch {
	case field.Enum() != nil:
		if value := field.Enum().Values().ByNumber(v.Enum()); value != nil {
			return string(value.Name())
		}
	case field.Message() != nil && !field.IsList():
		raw, err := messageJSON(v.Message().Interface())
		if err == nil {
			return strings.Trim(string(raw), `"`)
		}
	}
	return printable(fmt.Sprint(v.Interface()))
}
